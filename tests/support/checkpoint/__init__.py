"""Devices, sessions and stores for tests of checkpoints."""
