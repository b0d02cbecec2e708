"""Texture and surface objects of the `cpu` device: what they are made of, and the records that kernels read.

It compiles nothing."""
