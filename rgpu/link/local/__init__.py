"""Links between processes of one host: packets with descriptors, shared memory. It handles no sessions or devices."""
