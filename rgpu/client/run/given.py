"""One line for the user: the GPUs that a run was given, and where."""

from __future__ import annotations

from typing import Any

from rgpu.session.errors import Corrupt

GIB, MIB = 1 << 30, 1 << 20
WHOLE = 100  #: per cent of one device
NEARLY = 0.99  #: share of a device's memory that counts as all of it: sizes are in whole MiB


def given_line(session: str, given: Any) -> str:
    """``rgpu: NAME: 1 GPU (NVIDIA H200, 139 GiB) on node-a``. ``given``: of the pool's reply to session.create.

    Empty where an earlier version of the pool does not report it. Raises :class:`Corrupt`.
    """
    if given is None:
        return ""
    try:
        gpus, compute = int(given["gpus"]), int(given["compute"])
        memory, most = int(given["memory_bytes"]), int(given["device_bytes"])
        device, host, cuda = str(given["device"]), str(given["host"]), given["kind"] == "cuda"
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"what the pool says it gave cannot be read: {error!r}", reason="reply") from error
    what, each = "GPU" if cuda else "device", " each" if gpus > 1 else ""
    size = f"{_size(memory)}{each}" + ("" if memory >= NEARLY * most else " of its memory" if gpus == 1 else "")
    if compute == WHOLE:
        count = f"{gpus} {what}{'s' if gpus > 1 else ''}"
    elif compute:
        count = f"{compute / WHOLE:g} of a {what}" if gpus == 1 else f"{compute / WHOLE:g} of each of {gpus} {what}s"
    else:
        count = f"memory of a {what}" if gpus == 1 else f"memory of {gpus} {what}s"
    return f"rgpu: {session}: {count} ({device}, {size}) on {host}"


def _size(count: int) -> str:
    """``139 GiB``, ``1.5 GiB``, ``512 MiB``."""
    if count >= GIB:
        return f"{count / GIB:.3g} GiB"
    return f"{count / MIB:.3g} MiB"
