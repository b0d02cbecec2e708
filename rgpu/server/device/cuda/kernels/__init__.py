"""Kernels of rgpu itself: CUDA C++ sources, and NVRTC's output for them (see :mod:`.generate`)."""
