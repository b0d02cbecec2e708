"""`libnvidia-ml.so.1`: a session's devices, as the agent reports them to monitors. It makes no session."""
