"""Verbs about the pool: start and stop it, its nodes, its keys."""
