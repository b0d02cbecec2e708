"""Modules on the fake driver: what is learned of them, what their kernels print and allocate."""
