"""JAX for the programs of the suite: a GPU or nothing."""

from typing import Any

from common import DEVICE, skip


def jax_setup() -> Any:
    """JAX on its GPU; no GPU is a failure, not a run on the CPU."""
    try:
        import jax
    except ImportError as error:
        skip(f"JAX cannot be imported: {error}")
    if DEVICE == "cuda":
        assert jax.devices()[0].platform == "gpu", jax.devices()
    return jax
