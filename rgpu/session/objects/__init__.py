"""What a session consists of, as the calls that make it: live objects, graphs, module tables.

Pure: no sockets, no device.
"""
