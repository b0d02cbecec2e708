"""A worker: the process that holds one session's GPU side. It never reads the registry and serves no other session."""
