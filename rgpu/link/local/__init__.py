"""Between processes of one host: packets with descriptors, shared memory. It knows nothing of sessions or devices."""
