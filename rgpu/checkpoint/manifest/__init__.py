"""The manifest of an image: format, limits, and what a new image takes over from older ones.

Pure but for reading packs.
"""
