"""Collectives of the ``cuda`` device: data staged in host memory in stream order, and streams that wait for the host.

It knows NCCL's operations by :mod:`rgpu.server.collectives` only, and nothing of other sessions.
"""
