"""Gangs at the leader: members made together, generations, deadlines, their end; and the rendezvous of the ranks of
communicators."""
