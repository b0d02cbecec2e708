"""Hamiltonian Monte Carlo (NUTS) of NumPyro on the eight schools, in default settings: while loops and conditions."""

from common import digest, note, says, skip
from jax_common import jax_setup

jax = jax_setup()
try:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS
except ImportError as error:
    skip(f"NumPyro cannot be imported: {error}")
jnp = jax.numpy
effects = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
errors = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools() -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    spread = numpyro.sample("spread", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(effects)):
        apart = numpyro.sample("apart", dist.Normal(0, 1))
        numpyro.sample("seen", dist.Normal(mean + spread * apart, errors), obs=effects)


run = MCMC(NUTS(schools), num_warmup=200, num_samples=300, progress_bar=False)
run.run(jax.random.key(0))
samples = run.get_samples()
digest("samples", samples["mean"], samples["spread"], samples["apart"])
says("plausible", 1.0 < float(samples["mean"].mean()) < 8.0)
note("mean", float(samples["mean"].mean()))
