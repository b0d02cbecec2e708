"""Memory of the cuda device: allocations, staging, pinned memory, page hashes, peers. It knows no stream's work."""
