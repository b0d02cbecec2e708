"""The node daemon: ports, membership, the sessions that it holds, what it tells. It runs no CUDA call."""
