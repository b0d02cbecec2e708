"""A session's state taken from a device and restored on one. It imports no registry and no node."""
