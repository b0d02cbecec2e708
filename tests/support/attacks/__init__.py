"""What attacks a pool, each as a process of its own, and what measures beside it."""
