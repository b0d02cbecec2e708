"""Random keys and distributions."""

from common import digest
from jax_common import jax_setup

jax = jax_setup()
key = jax.random.key(7)
for name, make in {
    "uniform": lambda k: jax.random.uniform(k, (10001,)), "normal": lambda k: jax.random.normal(k, (333, 7)),
    "bits": lambda k: jax.random.bits(k, (5000,)), "permutation": lambda k: jax.random.permutation(k, 1000),
    "categorical": lambda k: jax.random.categorical(k, jax.numpy.zeros(50), shape=(900,)),
    "gamma": lambda k: jax.random.gamma(k, 2.5, (500,)), "poisson": lambda k: jax.random.poisson(k, 4.0, (500,)),
    "choice": lambda k: jax.random.choice(k, 500, (100,), replace=False),
}.items():
    key, sub = jax.random.split(key)
    digest(name, jax.jit(make)(sub))
digest("key", jax.random.key_data(key))
