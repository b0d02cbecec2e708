"""A run that outlives its terminal: its supervisor, the agent that goes on when that dies, how long it may run.

`rgpu run --detach` starts the supervisor in a session of its own. The supervisor starts `rgpu run` as in the
foreground, keeps the program's output and writes the run's record; it knows no pool.
"""
