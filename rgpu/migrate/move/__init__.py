"""A move without I/O: the three tables, what runs them, the options of a request, what it will cost. Pure."""
