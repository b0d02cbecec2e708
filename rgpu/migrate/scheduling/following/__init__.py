"""Incremental state of the pool between snapshots: equal to a function of the last snapshot, but faster. Pure."""
