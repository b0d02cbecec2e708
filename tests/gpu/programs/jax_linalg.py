"""jnp.linalg and lax.linalg: decompositions and solvers."""

from common import says, value
from jax_common import jax_setup

jax = jax_setup()
jax.config.update("jax_enable_x64", True)
jnp = jax.numpy
a = jax.random.normal(jax.random.key(1), (200, 200), dtype=jnp.float64)
b = jax.random.normal(jax.random.key(2), (200, 8), dtype=jnp.float64)
positive = a @ a.T + 200 * jnp.eye(200)


def near(name, x, y):  # noqa: ANN001, ANN201
    says(name, bool(jnp.allclose(x, y, rtol=1e-7, atol=1e-7)))


u, s, v = jnp.linalg.svd(a)
near("svd", (u * s) @ v, a)
value("singular", s.sum(), 1e-8)
values, vectors = jnp.linalg.eigh(positive)
near("eigh", (vectors * values) @ vectors.T, positive)
near("solve", a @ jnp.linalg.solve(a, b), b)
low = jnp.linalg.cholesky(positive)
near("cholesky", low @ low.T, positive)
q, r = jnp.linalg.qr(a)
near("qr", q @ r, a)
near("triangular", low @ jax.lax.linalg.triangular_solve(low, b, left_side=True, lower=True), b)
value("determinant", jnp.linalg.slogdet(a)[1], 1e-8)
value("fft", jnp.abs(jnp.fft.fft2(a)).sum(), 1e-8)
