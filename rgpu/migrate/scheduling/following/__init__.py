"""What a leader remembers of the pool between snapshots: a function of the last snapshot, faster. Pure."""
