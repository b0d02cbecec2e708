"""The daemon's side of its workers: start, warm workers, taking over after a restart, shares of compute.

It uses the workers' requests and imports none of their internals.
"""
