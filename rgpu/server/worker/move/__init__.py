"""A session leaves or arrives: the shells around the tables of a move.

All decisions are in the tables.
"""
