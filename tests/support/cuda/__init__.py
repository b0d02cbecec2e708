"""Processes and a driver for the ``cuda`` device."""
