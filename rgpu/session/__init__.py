"""What a session is: calls, journal, objects, answers. Pure: no sockets, no ZeroMQ, no CUDA."""
