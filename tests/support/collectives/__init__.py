"""Sessions with ranks of communicators, for tests."""
