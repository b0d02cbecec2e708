"""Parses PTX text into a ``Program``."""
