"""What several tests use: libraries built as they are, waiting, earlier versions; by subject in the packages below."""
