"""Gangs at the leader: all members made together, their generation, their deadlines, their end; and the ranks of
communicators, which find each other."""
