"""Verbs about checkpoints and journals: take, restore, list, check, replay."""
