"""A node's dealings with its pool: the registry's records, other nodes, the leader, its own place among them.

It knows the sessions held here, and no verb of users or operators.
"""
