"""The node daemon: its parts put together, its ports, what its workers and its figures say. It runs no CUDA call."""
