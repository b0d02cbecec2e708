"""Donated buffers, asynchronous dispatch, device_put both ways, callbacks to the host."""

import functools

import numpy as np
from common import digest, says
from jax_common import jax_setup

jax = jax_setup()
jnp = jax.numpy


@functools.partial(jax.jit, donate_argnums=0)
def update(state, x):  # noqa: ANN001, ANN201
    return state * 3 + x


state = jnp.zeros((1024, 1024), dtype=jnp.int32)
for turn in range(50):
    previous, state = state, update(state, turn)
says("donated", previous.is_deleted())
digest("state", state)
host = np.random.default_rng(5).integers(0, 1 << 30, (2048, 2048), dtype=np.int32)
there = jax.device_put(host)
host_before = host.copy()
there.block_until_ready()
digest("there", np.asarray(there))
says("same", bool((np.asarray(there) == host_before).all()))
called = jax.pure_callback(lambda x: (np.asarray(x) * 2).astype(np.int32), jax.ShapeDtypeStruct((16,), jnp.int32),
                           jnp.arange(16, dtype=jnp.int32))
digest("callback", called)
many = [jax.jit(lambda x, i=i: x + i)(jnp.arange(100)) for i in range(20)]
digest("many", *many)
