"""PTX text to a ``Program``."""
