"""The manifest of a checkpoint: format, limits, and what a new checkpoint takes over from older ones.

Pure but for reading packs.
"""
