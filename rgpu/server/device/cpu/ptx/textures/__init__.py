"""Textures and surfaces of PTX: the parts of an object that kernels read, the instructions, the sampling."""
