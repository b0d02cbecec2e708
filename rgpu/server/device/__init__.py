"""The devices that a worker can use: cpu and cuda. They handle calls and memory, not sessions, agents or nodes."""
