"""Collectives of the cpu device: numbers of all NCCL types, reductions in rank order, who waits for whom."""
