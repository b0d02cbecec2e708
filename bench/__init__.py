"""Benchmarks: programs that measure, each with a command of its own (docs/lab/methods.md says how they measure)."""
