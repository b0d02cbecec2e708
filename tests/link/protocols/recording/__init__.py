"""Bodies of the links' messages, brought about by the code that sends them in a session."""
