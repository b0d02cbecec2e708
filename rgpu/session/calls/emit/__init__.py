"""The generator's parts: each makes the text of one kind of file from the tables."""
