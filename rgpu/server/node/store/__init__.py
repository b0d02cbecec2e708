"""The node's checkpoints, and the resources that they share."""
