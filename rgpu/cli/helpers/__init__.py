"""Verbs that help on one machine: demo, doctor, settings, completion, simulation."""
