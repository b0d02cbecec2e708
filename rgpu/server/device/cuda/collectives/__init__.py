"""Collectives of the ``cuda`` device: data staged in host memory in stream order, and streams that wait for the host.

It uses NCCL's operations through :mod:`rgpu.server.collectives` only, and handles no other sessions.
"""
