"""Pages of a session: their hashes, which of them changed, and copies of them that outlive a pause.

It imports no store and no checkpoint.
"""
