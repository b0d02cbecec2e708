"""The Python API: pools, sessions and programs from Python; the command line asks the pool by the same functions."""
