"""A node's devices: promised memory, and health, examined by a separate process. Imports no sessions."""
