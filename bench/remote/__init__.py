"""Benchmarks of remote execution: what a call, a copy and a training step cost over the link."""
