"""Our own kernels: CUDA C++ sources, and what NVRTC made of them (see :mod:`.generate`)."""
