"""Capacity of the pool: admission, parking, draining, rebalancing by the leader. The plans are the scheduler's."""
