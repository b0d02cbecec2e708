"""The tables of messages: what follows from them, and that no byte on the wire changed."""
