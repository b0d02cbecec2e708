"""Collectives of a device: which belong together, what each rank brought, reductions in rank order, other sessions.

It knows no device and no journal, and nothing of who owns a session.
"""
