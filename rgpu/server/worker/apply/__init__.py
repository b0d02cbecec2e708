"""The journal applied to a device: order, fast path, lookahead. It knows no agent, no daemon and no move."""
