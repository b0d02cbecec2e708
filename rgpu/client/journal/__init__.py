"""What the agent keeps of the journal, and for how long. It knows no connection."""
