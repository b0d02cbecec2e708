"""Textures and surfaces of PTX: what kernels read of an object, the instructions, how they sample."""
