"""Parts of a worker for tests: links, devices that hold pages, the other process of a move."""
