"""The round trip of an awaited call in a worker, in compiled code: the library, and what it is given."""
