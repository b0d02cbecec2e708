"""`libnvidia-ml.so.1`: what monitors see of a session's device. It asks the agent and makes no session."""
