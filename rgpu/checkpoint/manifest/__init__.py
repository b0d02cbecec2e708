"""The manifest of a checkpoint: format, limits, and which parts of older checkpoints a new one reuses.

Pure but for reading packs.
"""
