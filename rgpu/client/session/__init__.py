"""One session of an agent: its event loop, its attachment to the owner, its tasks once a second."""
