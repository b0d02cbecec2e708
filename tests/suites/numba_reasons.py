"""Why tests of numba-cuda's suite do not pass: the table that the runner holds its results against."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """Tests, by patterns of their ids, that do not pass, and why. ``sometimes``: they may pass, too."""

    text: str
    tests: tuple[str, ...]
    sometimes: bool = False


KNOWN: tuple[Known, ...] = (
    Known("a warning that nvJitLink is missing comes where the test wants none (once a process, at its first link); "
          "with nvJitLink the cpu device would get machine code", (
              "cudapy.test_debug.TestDebugOutput.test_dump_assembly",
              "cudapy.test_warning.TestWarnings.test_efficient_launch_configuration",
          ), sometimes=True),
    Known("starts Python, compiles and runs within 30 s, or not, beside other work",
          ("cudapy.test_errors.TestStringArgCompileTime.*",), sometimes=True),
)

#: What the suite skips itself: the beginning of its reason, and what a user may do about it.
SKIPS: dict[str, str] = {
    "bfloat16 requires compute capability 8.0+": "the cpu device has 7.5",
    "FP8 is not supported": "the cpu device has compute capability 7.5",
    "CC 9.0 needed": "the cpu device has 7.5",
    "requires cc >= 9.0": "the cpu device has 7.5",
    "nvJitLink": "absent: it makes machine code",
    "LTO is not supported without nvjitlink": "",
    "need more than 1 gpus": "the run asks for one",
    "necessary binaries not generated": "no nvcc to build them",
}


def reason_of(test: str) -> Known | None:
    """The entry of the table for a test's id (``cudapy.test_ipc.TestIpcMemory.test_ipc_array``)."""
    return next((known for known in KNOWN if any(fnmatch.fnmatchcase(test, pattern) for pattern in known.tests)), None)


def skip_group(reason: str) -> str:
    """The key that a skip is counted under: the beginning in ``SKIPS`` that it has, or its own words."""
    return next((start for start in SKIPS if reason.startswith(start)), reason)
