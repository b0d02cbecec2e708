"""The routing library: which member each driver function concerns."""
