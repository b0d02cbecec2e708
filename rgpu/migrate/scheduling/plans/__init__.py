"""Plans of several moves: preempting, rebalancing, consolidating. Pure: a snapshot in, moves with reasons out."""
