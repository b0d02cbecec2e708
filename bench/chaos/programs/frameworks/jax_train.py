"""JAX: a multilayer perceptron under jit with donated weights, and batches put on the device ahead.

usage: jax_train.py STEPS SECONDS
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
from functools import partial

import numpy as np
from common import Steps, last_of_burst, skip

try:
    import jax
except ImportError as missing:
    skip(f"JAX cannot be imported: {missing}")
jnp = jax.numpy
if jax.devices()[0].platform != "gpu":
    skip(f"JAX finds no GPU, only {jax.devices()}")

keys = jax.random.split(jax.random.key(1), 4)
sizes = (64, 256, 256, 10)
weights = [(jax.random.normal(key, (m, n)) * m**-0.5, jnp.zeros(n))
           for key, m, n in zip(keys, sizes, sizes[1:], strict=False)]
chance = np.random.default_rng(1)
batches = [chance.standard_normal((256, 64)).astype(np.float32) for _ in range(6)]
classes = jnp.asarray(chance.integers(0, 10, 256))


def cost(weights, images, key):  # noqa: ANN001, ANN201
    x = images + 0.01 * jax.random.normal(key, images.shape)
    for w, b in weights[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = weights[-1]
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w + b), classes[:, None], 1).mean()


@partial(jax.jit, donate_argnums=0)
def train(weights, images, key):  # noqa: ANN001, ANN201
    now, slopes = jax.value_and_grad(cost)(weights, images, key)
    return now, jax.tree.map(lambda w, g: w - 0.05 * g, weights, slopes)


steps, root = Steps(), jax.random.key(9)
ahead = jax.device_put(batches[0])
for number in steps:
    images, ahead = ahead, jax.device_put(batches[(number + 1) % 6])
    now, weights = train(weights, images, jax.random.fold_in(root, number))
    if last_of_burst(number):
        steps.saw(now)
steps.end(*jax.tree.leaves(weights))
