"""Who is in the pool and who leads it: leases, registration, election, keys on record.

It knows nothing of sessions.
"""
