"""The places where a store may lie: a directory, S3-compatible storage, another process.

They handle blobs and import nothing of checkpoints.
"""
