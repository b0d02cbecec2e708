"""Texture and surface objects of the `cpu` device: how they are made, and the records that kernels read.

It compiles nothing.
"""
