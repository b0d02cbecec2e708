"""Pages and calls between two workers: frames, lanes, sender, receiver, memory of a peer on the same host.

It decides nothing about a move.
"""
