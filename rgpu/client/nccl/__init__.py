"""`libnccl.so.2` of rgpu: NCCL's functions as calls of the session."""
