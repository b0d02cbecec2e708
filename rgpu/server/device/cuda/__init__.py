"""The cuda device: the driver of an NVIDIA GPU, behind the protocol of :mod:`rgpu.checkpoint.device`."""
