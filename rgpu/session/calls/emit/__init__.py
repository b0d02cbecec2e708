"""Parts of the generator: each makes the text of one kind of file from the tables."""
