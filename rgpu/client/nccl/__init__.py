"""Builds libnccl.so.2 of ours: NCCL's functions as calls of the session."""
