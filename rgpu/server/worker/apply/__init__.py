"""The journal applied to a device: one loop, two paths, order, lookahead. It imports no agent, no daemon, no move."""
