"""Inner loops over pages, compiled for the processor that runs them.

It handles arrays of bytes and imports nothing of checkpoints.
"""
