"""Basis of every decision of one leader's term: records as read, decisions by compare-and-swap, fenced commands,
locks, background work. It is independent of verbs and of the life cycle of sessions.
"""
