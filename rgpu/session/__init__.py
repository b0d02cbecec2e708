"""Model of a session: calls, journal, objects, answers. Pure: no sockets, no ZeroMQ, no CUDA."""
