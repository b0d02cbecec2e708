"""The agent's end of the data link to the worker. It does not depend on the pool or on what records contain."""
