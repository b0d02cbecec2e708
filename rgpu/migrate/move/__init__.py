"""A move without I/O: its three state tables, their interpreter, a request's options, the cost forecast. Pure."""
