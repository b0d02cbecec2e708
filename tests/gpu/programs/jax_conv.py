"""Convolutions and their gradients."""

from common import digest, value
from jax_common import jax_setup

jax = jax_setup()
jnp = jax.numpy
k1, k2, k3 = jax.random.split(jax.random.key(3), 3)
x, w = jax.random.normal(k1, (8, 16, 32, 32)), jax.random.normal(k2, (32, 16, 3, 3))


@jax.jit
def forward(x, w):  # noqa: ANN001, ANN201
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")


@jax.jit
def slopes(x, w):  # noqa: ANN001, ANN201
    return jax.grad(lambda x, w: jnp.square(forward(x, w)).mean(), argnums=(0, 1))(x, w)


digest("integers", forward(jnp.round(x * 3), jnp.round(w * 3)))
y, (dx, dw) = forward(x, w), slopes(x, w)
value("forward", jnp.abs(y).sum(), 1e-3)
value("dx", jnp.abs(dx).sum(), 1e-3)
value("dw", jnp.abs(dw).sum(), 1e-3)
value("half", jnp.abs(forward(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(jnp.float32)).sum(), 1e-2)
pooled = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
value("pooled", pooled.sum(), 1e-3)
