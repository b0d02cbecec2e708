"""Plans of several moves: preempting, rebalancing, consolidating. Pure: from a snapshot, moves with reasons."""
