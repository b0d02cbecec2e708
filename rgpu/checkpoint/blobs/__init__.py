"""The places where a store may lie: a directory, S3-compatible storage, another process.

They know blobs, and nothing of checkpoints.
"""
