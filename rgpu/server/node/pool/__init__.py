"""A node's part in its pool: the registry's records, links to other nodes and the leader, its own registration.

Uses the sessions held here; does not import verbs of users or operators.
"""
