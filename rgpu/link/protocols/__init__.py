"""The tables of the links' messages: one for each protocol, pure data.

Names, numbers, directions, fields and their types stand here and nowhere else. :mod:`.generate` makes
:mod:`rgpu.link.messages` (constants, layouts and records for Python, a header for C++) and ``docs/protocols`` of them.
Nothing here knows of sockets, threads or sessions, and the product imports what was generated, not these tables.
"""
