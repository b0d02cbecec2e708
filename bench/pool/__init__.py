"""Benchmarks of the pool: placement, scale of the registry, room made by moves, shares of a device."""
