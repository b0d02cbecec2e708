"""Verbs about checkpoints and journals: take, put back, list, check, replay."""
