"""The elected leader's work: place, move, check, recover, park, rebalance and end sessions.

It reaches nodes only by their verbs.
"""
