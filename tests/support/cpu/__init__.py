"""Kernels, references and a stub engine for the ``cpu`` device."""
