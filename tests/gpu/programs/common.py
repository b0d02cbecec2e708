"""What the programs of the suite share: how they print results. They know nothing of rgpu.

The forms of the lines stand in ``tests/gpu/suite/outputs.py``.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any, NoReturn

#: ``COMPAT_DEVICE=cpu`` lets most PyTorch programs be tried where there is no GPU.
DEVICE = os.environ.get("COMPAT_DEVICE", "cuda")


def raw(value: Any) -> bytes:
    """The bytes of a tensor or an array of any framework, or of text."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, (list, tuple)):
        return b"".join(raw(item) for item in value)
    if hasattr(value, "detach"):  # PyTorch
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    if hasattr(value, "get") and hasattr(value, "device"):  # CuPy
        value = value.get()
    import numpy

    return numpy.ascontiguousarray(numpy.asarray(value)).tobytes()


def digest(label: str, *values: Any) -> None:
    """Results that are the same, bit for bit, on every run."""
    total = hashlib.sha256()
    for value in values:
        total.update(raw(value))
    print(f"digest {total.hexdigest()} {label}", flush=True)


def value(name: str, number: Any, tolerance: float) -> None:
    """A result that may differ by ``tolerance``, relative to the larger."""
    print(f"value {name} {float(number)!r} tol {tolerance!r}", flush=True)


def says(name: str, text: Any) -> None:
    """Text that must be the same."""
    print(f"says {name} {' '.join(str(text).split())}", flush=True)


def note(name: str, text: Any) -> None:
    """Shown, never compared."""
    print(f"note {name} {' '.join(str(text).split())}", flush=True)


def skip(reason: str) -> NoReturn:
    """This machine lacks what the program needs."""
    print(f"skip {reason}", flush=True)
    sys.exit(77)


def first_line(error: BaseException) -> str:
    """What an error says first: what follows holds addresses and advice."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def torch_setup(seed: int = 1, deterministic: bool = True) -> Any:
    """PyTorch, seeded; deterministic algorithms only, fixed cuDNN algorithms."""
    import torch

    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
    return torch
