"""What the elected leader does: place, move, check, recover, park, rebalance, end.

It reaches nodes only by their verbs.
"""
