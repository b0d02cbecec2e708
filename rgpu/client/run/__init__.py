"""`rgpu run`: the program with the driver library in front, and the agent that asks the pool for its sessions."""
