"""The node's images and what its checkpoints share."""
