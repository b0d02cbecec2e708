"""Contents of a session, as the calls that make them: live objects, graphs, module tables.

Pure: no sockets, no device.
"""
