"""A leader over a real embedded registry and nodes that are objects."""
