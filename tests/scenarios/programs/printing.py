"""A program whose kernels print, and which prints itself, through one C library's standard output.

usage: printing.py FOLDER STEPS LINES [GATE ...]. Each step launches a kernel that prints LINES lines, says
``launched``, waits for it and says ``waited``. At a step named as a gate it stops: at ``N`` behind the launch, with
text under way that it has not seen, at ``N.`` behind the wait, until the file FOLDER/GATE is there. The whole output
is :func:`expected`.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

SOURCE = rb"""
extern "C" __global__ void speak(int step, int lines) {
    for (int i = 0; i < lines; ++i)
        printf("kernel %d line %d of %d %s %.3f\n", step, i, lines, "and so on", 0.125 * i);
}
"""
PATIENCE = 300.0  #: s


def expected(steps: int, lines: int, gates: list[str]) -> list[str]:
    """Every line of the output."""
    found = []
    for step in range(steps):
        found.append(f"launched {step}")
        found += [f"gate {step}"] * (str(step) in gates)
        found += [f"kernel {step} line {line} of {lines} and so on {0.125 * line:.3f}" for line in range(lines)]
        found.append(f"waited {step}")
        found += [f"gate {step}."] * (f"{step}." in gates)
    return found


def main() -> None:
    import numpy as np
    from common import check, kernels, start
    from cuda.bindings import driver

    folder, steps, lines, gates = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    libc = ctypes.CDLL(None)

    def say(text: str) -> None:
        libc.printf(b"%s\n", text.encode())

    def gate(name: str) -> None:
        if name in gates:
            say(f"gate {name}")
            libc.fflush(None)
            deadline = time.monotonic() + PATIENCE
            while not (folder / name).exists():
                if time.monotonic() > deadline:
                    raise SystemExit(f"gate {name} was not opened")
                time.sleep(0.005)

    start()
    _, speak = kernels(SOURCE, "speak")
    for step in range(steps):
        values = np.array([step], np.int32), np.array([lines], np.int32)
        arguments = np.array([value.ctypes.data for value in values], np.uint64)
        check(driver.cuLaunchKernel(speak, 1, 1, 1, 1, 1, 1, 0, 0, arguments.ctypes.data, 0))
        say(f"launched {step}")
        gate(str(step))
        check(driver.cuCtxSynchronize())
        say(f"waited {step}")
        gate(f"{step}.")
    libc.fflush(None)


if __name__ == "__main__":
    main()
