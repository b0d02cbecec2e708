"""The data link: sealed frames over sockets, its lanes, and the tickets that open it.

It knows nothing of what the frames carry.
"""
