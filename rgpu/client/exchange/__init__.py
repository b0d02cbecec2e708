"""The round trip of an awaited call in the agent, in compiled code: the library, and what it is given."""
