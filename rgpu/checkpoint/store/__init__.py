"""Checkpoints in a store: writing, reading, keeping, collecting, carrying them. It knows no registry and no node."""
