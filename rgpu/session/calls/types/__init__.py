"""The CUDA types that implemented functions use, as data: building needs no CUDA headers."""
