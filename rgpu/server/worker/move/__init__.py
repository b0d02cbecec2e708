"""A session leaves or arrives: the shells around the tables of a move.

They decide nothing that the tables do not say.
"""
