"""A move without I/O: the three tables, what runs them, what whoever asks may want, what it will cost. Pure."""
