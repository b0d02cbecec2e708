"""Gangs: the number of ranks that each host takes, the choice of hosts, and joint moves of members. Pure."""
