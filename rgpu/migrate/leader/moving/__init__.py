"""The leader's part of moves: checks, one move, all moves under way. The table of a move is in `rgpu.migrate.move`."""
