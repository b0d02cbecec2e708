"""The node daemon: assembly of its parts, its ports, its workers' events and its metrics. It runs no CUDA call."""
