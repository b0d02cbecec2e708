"""A convolutional network of flax (nnx) trained with optax, in default settings: XLA tunes its convolutions."""

from common import says, skip, value
from jax_common import jax_setup

jax = jax_setup()
try:
    import optax
    from flax import nnx
except ImportError as error:
    skip(f"flax or optax cannot be imported: {error}")
jnp = jax.numpy


class Network(nnx.Module):
    """Two convolutions with batch normalization, pooling, dropout, two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, 32, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.second = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.dense = nnx.Linear(64 * 8 * 8, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):  # noqa: ANN001, ANN204
        x = nnx.avg_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.second(x)), (2, 2), (2, 2))
        return self.out(self.drop(nnx.relu(self.dense(x.reshape(x.shape[0], -1)))))


@nnx.jit
def step(model, optimizer, images, classes):  # noqa: ANN001, ANN201
    def loss(model):  # noqa: ANN001, ANN202
        return optax.softmax_cross_entropy_with_integer_labels(model(images), classes).mean()

    now, slopes = nnx.value_and_grad(loss)(model)
    optimizer.update(model, slopes)
    return now


model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
keys = jax.random.split(jax.random.key(1), 2)
images, classes = jax.random.normal(keys[0], (64, 32, 32, 3)), jax.random.randint(keys[1], (64,), 0, 10)
losses = [float(step(model, optimizer, images, classes)) for _ in range(60)]
value("first", losses[0], 1e-3)
says("learned", losses[-1] < 0.1 * losses[0])
