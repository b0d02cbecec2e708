"""Whether an error of the driver was caused by the program's own work, in which case the program receives it, or by the
hardware, in which case the session is recovered.

Pure (OWNERSHIP 9). Sources: CUDA driver API, "CUresult"; the XIDs that NVIDIA's device plugin for Kubernetes attributes
to the program (XID Errors, NVIDIA data center documentation).

=========  ===============================================================================
CUresult   caused by
=========  ===============================================================================
214        the hardware: an uncorrectable ECC error
220        the hardware: an uncorrectable NVLink error
226        the hardware: contained; its other cause, accesses of peers, occurs in no session
46, 999    the hardware if the driver has lost the device, else the program
719, 702   the same: a kernel that failed or took too long for a display
others     the program
=========  ===============================================================================

Under MPS (NVIDIA, "Multi-Process Service", error containment) every process of a server gets the error of one, or of
one that was killed with work under way. There an error that ends a context says nothing about whose it is.
"""

from __future__ import annotations

from collections.abc import Callable

#: CUresult → description.
HARDWARE = {
    214: "an uncorrectable ECC error",
    220: "an uncorrectable NVLink error",
    226: "an error that the GPU contained",
}
#: Results that a lost device returns, but that have other causes as well.
UNCLEAR = frozenset({46, 702, 719, 999})
#: Results after which the context is unusable: every later call returns them.
STICKY = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 720})
#: Results of MPS itself: its server, or this process's place on it, was lost.
OF_MPS = frozenset({805, 806, 807, 810})
#: XIDs that programs cause: page faults, illegal instructions, channels that were ended with the program.
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})


def fault(result: int, lost: Callable[[], str]) -> str:
    """Return why the device is at fault for this CUresult; empty where the program is.

    ``lost``: returns why the driver has lost the device, or an empty string; called only where the result alone does
    not decide.
    """
    if result in HARDWARE:
        return HARDWARE[result]
    if result in UNCLEAR and (why := lost()):
        return f"{why} (CUresult {result})"
    return ""


def may_be_a_neighbours(result: int) -> str:
    """Return why a process under MPS cannot take this CUresult for its own; empty where it can."""
    if result in OF_MPS:
        return f"its MPS server was lost (CUresult {result})"
    if result in STICKY | UNCLEAR:
        return (f"error {result}, which all sessions of an MPS server get when one of them fails or is killed; outside "
                "MPS a replay shows whose it is")
    return ""


def suspicious(xid: int) -> bool:
    """Whether this XID is a reason to examine the device."""
    return xid not in OF_PROGRAMS
