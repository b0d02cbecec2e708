"""The node's checkpoints and what its checkpoints share."""
