"""The sessions that a node holds: their workers and epochs, and the transitions that the records command.

It does not import the registry, nor links to other nodes.
"""
