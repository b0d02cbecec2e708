"""The Python API: pools, sessions and programs from Python; the command line uses the same functions."""
