"""Moves as the leader drives them: checks, one move, those under way. A move's table is `rgpu.migrate.move`'s."""
