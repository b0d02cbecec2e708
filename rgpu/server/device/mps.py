"""Whether this process's CUDA contexts share a GPU through an MPS server (NVIDIA, "Multi-Process Service")."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PIPES = "CUDA_MPS_PIPE_DIRECTORY"  #: where the driver looks for a control daemon
LOGS = "CUDA_MPS_LOG_DIRECTORY"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  #: of the multiprocessors that a process may use
USUAL = "/tmp/nvidia-mps"  #: where the driver looks without PIPES
CONTROL = "control"  #: a control daemon's entry in that folder


def used(environ: Mapping[str, str]) -> bool:
    """Whether a process with this environment becomes a client of a control daemon."""
    try:
        return (Path(environ.get(PIPES) or USUAL) / CONTROL).exists()
    except OSError:
        return False
