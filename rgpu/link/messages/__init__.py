"""Numbers, layouts and records of the links' messages, generated from the tables in :mod:`rgpu.link.protocols`.

``native/shim_link.hpp`` is the same for C++.
"""
