"""One session of an agent: its event loop, its attachment to the owner, what happens once a second."""
