"""The box around a worker: what it is started with and held to. It knows no session, node or device."""
