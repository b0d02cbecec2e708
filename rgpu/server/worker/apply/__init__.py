"""The journal applied to a device: one loop over a native or a Python path, order, lookahead. It knows no agent, no daemon and no move."""
