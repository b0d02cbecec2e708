"""The journal applied to a device: one loop, two paths, order, lookahead. It knows no agent, no daemon, no move."""
