"""Pages of the documentation, executed as written."""
