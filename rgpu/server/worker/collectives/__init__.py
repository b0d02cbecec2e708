"""Rank links: a worker gets what ranks of other sessions brought to collectives, and gives what its own did."""
