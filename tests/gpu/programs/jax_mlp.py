"""A multilayer perceptron trained by jax.grad."""

import sys

from common import digest, note, value
from jax_common import jax_setup

jax = jax_setup()
jnp = jax.numpy
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 100
keys = jax.random.split(jax.random.key(1), 5)
sizes = (64, 256, 256, 10)
weights = [(jax.random.normal(k, (m, n)) * m**-0.5, jnp.zeros(n)) for k, m, n in zip(keys, sizes, sizes[1:],
                                                                                    strict=False)]
images, classes = jax.random.normal(keys[3], (512, 64)), jax.random.randint(keys[4], (512,), 0, 10)


def loss(weights, images, classes):  # noqa: ANN001, ANN201
    x = images
    for w, b in weights[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = weights[-1]
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w + b), classes[:, None], 1).mean()


@jax.jit
def step(weights, images, classes):  # noqa: ANN001, ANN201
    now, slopes = jax.value_and_grad(loss)(weights, images, classes)
    return now, jax.tree.map(lambda w, g: w - 0.1 * g, weights, slopes)


losses = []
for _ in range(steps):
    now, weights = step(weights, images, classes)
    losses.append(now)
if "--tolerant" in sys.argv:  # autotuning may choose another algorithm on each run
    value("last", losses[-1], 1e-2)
    value("weights", sum(float(jnp.abs(w).sum()) for w, _ in weights), 1e-2)
else:
    digest("losses", jnp.stack(losses))
    digest("weights", *jax.tree.leaves(weights))
note("last", float(losses[-1]))
