"""The tables of the links' messages: one for each protocol, pure data.

Names, numbers, directions, fields and their types are defined only here. :mod:`.generate` makes
:mod:`rgpu.link.messages` (constants, layouts and records for Python, a header for C++) and ``docs/protocols`` of them.
Nothing here uses sockets, threads or sessions, and the product imports the generated modules, not these tables.
"""
