"""A node's devices: what of them is promised, and their health, examined by a process. They know no session."""
