"""A session's state taken from a device and put back on one. It knows no registry and no node."""
