"""Inner loops over pages, compiled for the processor that runs them.

It knows arrays of bytes, and nothing of checkpoints.
"""
