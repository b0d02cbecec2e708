"""Benchmarks of moves: modes of a move side by side, and the page stream and page hash below them."""
