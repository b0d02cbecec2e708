"""Membership of the pool, and its leader: leases, registration, election, keys on record.

Sessions are not its concern.
"""
