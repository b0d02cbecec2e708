"""Benchmarks of checkpoints and recovery: pauses, sizes, what a checkpoint and a death cost a training."""
