"""The worker's end of the data link to the agent. It knows the runtime, and no move."""
