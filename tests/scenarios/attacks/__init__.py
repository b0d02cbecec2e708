"""A pool under attack by real processes: strangers without a key, users, and what others notice of it."""
