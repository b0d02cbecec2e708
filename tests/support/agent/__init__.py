"""The two sides of an agent: a fake shim and a fake pool."""
