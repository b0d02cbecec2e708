"""Verbs that move sessions: one, all of a host, or those that make room."""
