"""Checkpoints of sessions that share communicators, at one consistent cut; all of them count, or none."""
