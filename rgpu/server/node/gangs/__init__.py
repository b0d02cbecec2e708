"""Gangs as people see them: their rows, who waits for whom, the verbs that tell of them."""
