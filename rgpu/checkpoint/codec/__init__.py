"""Pages to chunks and back: format, compression, and the processes that encode and fill frames. It imports no store."""
