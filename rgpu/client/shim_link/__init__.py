"""Between the shim and the agent: the socket, the rings in shared memory, what comes back to the program.

It knows no worker.
"""
