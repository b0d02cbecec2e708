"""The agent's end of the link to the shim: the socket, rings in shared memory, answers to the program.

Independent of the worker and its connection.
"""
