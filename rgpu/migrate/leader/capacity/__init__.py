"""Room in the pool, made by the leader: the queue, parking, draining, rebalancing. The plans are the scheduler's."""
