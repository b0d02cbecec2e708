"""Verbs that move sessions: one, all of a host, or some to rebalance the pool."""
