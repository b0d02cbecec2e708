"""The data link: sealed frames over sockets, its lanes, and the tickets that open it.

It does not interpret what the frames carry.
"""
