"""The calls of the journal that the agent keeps, and for how long. Independent of any connection."""
