"""The journal of a session: its record, its files, and the order in which calls are applied.

Pure: no sockets, no device.
"""
