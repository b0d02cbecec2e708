"""The process that a node's workers are forked from, and the daemon's side of it. It knows no session."""
