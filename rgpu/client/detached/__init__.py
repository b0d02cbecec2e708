"""A run that outlives its terminal: its supervisor, the agent that takes over if that dies, its time limit.

`rgpu run --detach` starts the supervisor in a session of its own. The supervisor starts `rgpu run` as in the
foreground, keeps the program's output and writes the run's record; it does not contact the pool.
"""
