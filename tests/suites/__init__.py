"""Test suites that other projects ship, run as users' programs of a pool."""
