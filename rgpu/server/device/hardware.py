"""Cause of an error of the driver: the program's own work, which is told, or the hardware's, from which it is
recovered.

Pure (OWNERSHIP 9). Source: CUDA driver API, "CUresult"; what NVIDIA's device plugin for Kubernetes takes for the
program's among the XIDs (XID Errors, NVIDIA data center documentation).

=========  ===============================================================================
CUresult   whose
=========  ===============================================================================
214        the hardware's: an ECC error that cannot be corrected
220        the hardware's: likewise of NVLink
226        the hardware's: contained; what else it stands for, accesses of peers, no session has
46, 999    the hardware's if the device is lost to the driver, else the program's
719, 702   likewise: a kernel that failed or took too long for a display
others     the program's
=========  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Callable

#: CUresult → what it says.
HARDWARE = {
    214: "an uncorrectable ECC error",
    220: "an uncorrectable NVLink error",
    226: "an error that the GPU contained",
}
#: Results that a lost device gives, and others as well.
UNCLEAR = frozenset({46, 702, 719, 999})
#: XIDs that programs cause: page faults, illegal instructions, channels that were ended with them.
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})


def fault(result: int, lost: Callable[[], str]) -> str:
    """Why the device is at fault for this CUresult; empty where the program is.

    ``lost``: asked only where the result alone does not tell; why the driver has lost the device, or empty.
    """
    if result in HARDWARE:
        return HARDWARE[result]
    if result in UNCLEAR and (why := lost()):
        return f"{why} (CUresult {result})"
    return ""


def suspicious(xid: int) -> bool:
    """Whether this XID is a reason to examine the device."""
    return xid not in OF_PROGRAMS
