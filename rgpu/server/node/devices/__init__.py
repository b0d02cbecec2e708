"""The health of a node's devices: examined by a process of its own. It knows nothing of sessions."""
