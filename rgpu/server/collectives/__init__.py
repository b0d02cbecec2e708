"""Collectives whose ranks are in several sessions: what each rank brought, and how workers give it to each other.

It knows no device and no journal, and nothing of who owns a session.
"""
