"""The devices that a worker may have: cpu and cuda. They know calls and memory, no session, agent or node."""
