"""Simulation with a virtual clock: recorded task lists drive the scheduling code that the coordinator runs."""
