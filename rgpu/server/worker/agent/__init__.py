"""The worker's end of the data link to the agent. It uses the runtime, and imports nothing of moves."""
