"""Verbs about detached runs of this machine: start one, follow, wait, signal; they need no pool."""
