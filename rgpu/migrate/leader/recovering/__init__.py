"""Sessions whose owner cannot have them any more, and what a former leader left unfinished: brought back."""
