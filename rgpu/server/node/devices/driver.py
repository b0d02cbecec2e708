"""The node's own GPU driver: its release, and a one-line explanation where it cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

from rgpu.session.errors import DeviceError

VERSION_FILE = Path("/proc/driver/nvidia/version")
_RELEASE = re.compile(r"Kernel Module\D+(?:for \S+\s+)?(\d+(?:\.\d+){1,2})\b")
NO_DEVICE, STUB, UNKNOWN_TO_DRIVER = 100, 34, 101


def release(file: Path = VERSION_FILE) -> str:
    """The installed kernel module's release, as 580.65.06; empty where there is none."""
    try:
        found = _RELEASE.search(file.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return ""
    return found.group(1) if found else ""


def explain(error: BaseException, device: str) -> str:
    """Explain in one line why a CUDA device cannot be used, and what to do."""
    advice = "or serve the CPU device with --device cpu"
    if isinstance(error, ImportError):
        return f"{device}: cuda-bindings is not installed: pip install 'rgpu-live[cuda]', {advice}"
    if isinstance(error, DeviceError) and error.result == UNKNOWN_TO_DRIVER:
        return f"{device}: this machine has no GPU of that number; `nvidia-smi -L` lists those it has"
    known = release()
    if isinstance(error, DeviceError) and known:
        return (f"{device}: driver {known} is loaded but no GPU can be used ({error.message}): look at nvidia-smi and "
                f"at the rights on /dev/nvidia*, {advice}")
    if isinstance(error, DeviceError) or "libcuda" in str(error) or not known:
        return (f"{device}: this machine has no NVIDIA driver or no GPU: install the driver (580 or newer; in a "
                f"container: start it with the GPU), {advice}")
    return f"{device}: {str(error).splitlines()[0] if str(error) else type(error).__name__}, {advice}"
