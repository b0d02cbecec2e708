"""A neural differential equation of diffrax and equinox, trained through an adaptive solver, in default settings."""

from common import says, skip, value
from jax_common import jax_setup

jax = jax_setup()
try:
    import diffrax
    import equinox
    import optax
except ImportError as error:
    skip(f"diffrax, equinox or optax cannot be imported: {error}")
jnp = jax.numpy


def solve(network, start, times):  # noqa: ANN001, ANN201
    return diffrax.diffeqsolve(diffrax.ODETerm(lambda t, y, args: network(y)), diffrax.Tsit5(), times[0], times[-1],
                               0.05, start, stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
                               saveat=diffrax.SaveAt(ts=times)).ys


@equinox.filter_value_and_grad
def loss(network, starts, times, wanted):  # noqa: ANN001, ANN201
    return ((jax.vmap(solve, (None, 0, None))(network, starts, times) - wanted) ** 2).mean()


@equinox.filter_jit
def step(network, state, starts, times, wanted):  # noqa: ANN001, ANN201
    now, slopes = loss(network, starts, times, wanted)
    updates, state = optimizer.update(slopes, state, network)
    return now, equinox.apply_updates(network, updates), state


times = jnp.linspace(0.0, 2.0, 20)
angles = jnp.linspace(0.1, 1.5, 32)
starts = jnp.stack([jnp.cos(angles), jnp.sin(angles)], 1)
wanted = jnp.stack([jnp.cos(angles[:, None] + times), jnp.sin(angles[:, None] + times)], 2)
network = equinox.nn.MLP(2, 2, 32, 2, activation=jax.nn.softplus, key=jax.random.key(3))
optimizer = optax.adam(1e-2)
state = optimizer.init(equinox.filter(network, equinox.is_inexact_array))
losses = []
for _ in range(40):
    now, network, state = step(network, state, starts, times, wanted)
    losses.append(float(now))
value("first", losses[0], 1e-3)
says("learned", losses[-1] < 0.5 * losses[0])
