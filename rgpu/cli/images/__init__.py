"""Verbs about images and journals: take, put back, list, check, replay."""
