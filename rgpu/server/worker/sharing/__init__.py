"""Memory and events that this worker's session shares with others of its host. It imports no agent and no move."""
