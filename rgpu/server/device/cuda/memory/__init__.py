"""Memory of the cuda device: allocations, staging, pinned memory, page hashes, peers. It submits no stream's work."""
