"""Checkpoints in a store: write, read, retain, collect, archive them. It imports no registry and no node."""
