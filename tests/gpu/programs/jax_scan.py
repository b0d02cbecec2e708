"""scan, while_loop, cond, fori_loop."""

from common import digest
from jax_common import jax_setup

jax = jax_setup()
jnp, lax = jax.numpy, jax.lax
x = jnp.arange(1000, dtype=jnp.int32)
total, path = jax.jit(lambda x: lax.scan(lambda c, a: ((c * 31 + a) % 65521, c), jnp.int32(1), x))(x)
digest("scan", total, path)
digest("while", jax.jit(lambda n: lax.while_loop(lambda s: s[0] > 1, lambda s: (
    jnp.where(s[0] % 2 == 0, s[0] // 2, 3 * s[0] + 1), s[1] + 1), (n, 0)))(jnp.int32(27)))
digest("fori", jax.jit(lambda x: lax.fori_loop(0, 200, lambda i, a: jnp.roll(a, i) ^ i, x))(x))
for flag in (True, False):
    digest(f"cond-{flag}", jax.jit(lambda p, x: lax.cond(p, lambda a: a * 2, lambda a: a - 1, x))(flag, x))
digest("associative", jax.jit(lambda x: lax.associative_scan(jnp.maximum, x ^ 421))(x))
