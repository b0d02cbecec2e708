"""Checkpoints of sessions that share communicators, at one moment of their journals, counted together or not at all."""
