"""The agent's end of the data link to the worker. It knows no pool and no record."""
