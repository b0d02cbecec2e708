"""The three tables of a move as a model: its worlds, their exploration, mutants of the rows."""
