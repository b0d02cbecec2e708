"""The sessions that a node holds: their workers and epochs, and what the registry's records make of them.

It knows no registry and no other node.
"""
