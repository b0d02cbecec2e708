"""jit, vmap, dtypes, device properties, round trips."""

from common import digest, note, says
from jax_common import jax_setup

jax = jax_setup()
jnp = jax.numpy
says("devices", len(jax.devices()))
says("kind", jax.devices()[0].device_kind)


@jax.jit
def steps(x, y):  # noqa: ANN001, ANN201
    return jnp.where(x > 0, x * y + 1, jnp.abs(x - y)), (x * 2).sum()


x = jnp.arange(-5000, 5000, dtype=jnp.float32).reshape(100, 100)
y = jnp.arange(10000, dtype=jnp.float32).reshape(100, 100)
digest("steps", *steps(x, y))
digest("vmap", jax.vmap(lambda row: jnp.sort(row)[::-1])(x))
for dtype in (jnp.int8, jnp.uint32, jnp.float16, jnp.bfloat16):
    digest(jnp.dtype(dtype).name, jax.jit(lambda a: a + a)(jnp.arange(77).astype(dtype)))
digest("matmul", jax.jit(jnp.dot)(x[:, :64].astype(jnp.int32), x[:64].astype(jnp.int32)))
for size in (64, 127, 1000):
    digest(f"shape-{size}", jax.jit(lambda a: jnp.cumsum(a))(jnp.arange(size)))
stats = jax.devices()[0].memory_stats() or {}
note("limit", stats.get("bytes_limit"))
