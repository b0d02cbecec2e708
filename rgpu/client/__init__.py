"""The client side: driver library, agent, `rgpu run`. It never imports the server, checkpoints or moves."""
