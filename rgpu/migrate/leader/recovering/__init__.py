"""Recovery of sessions whose owner is lost, and of operations that a former leader left unfinished."""
