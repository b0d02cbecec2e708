"""Membership of the pool and its leader: leases, registration, election, keys on record.

It knows nothing of sessions.
"""
