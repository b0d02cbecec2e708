"""A pool of real processes, the verbs asked of it, and what disturbs it."""
