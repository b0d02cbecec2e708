"""rgpu: live migration and checkpointing of remote GPU sessions."""

__version__ = "0.1.0"
