"""Records the corpora of tests/session/corpora anew: the example programs, small, on a local pool's ``cpu`` device.

``python -m tests.session.record_corpora``: needed after a change of what the shim publishes. It writes the journals,
the answers, and what a replay of each gives today (:mod:`tests.server.worker.apply.test_replaying`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.pools.pool import EXAMPLES, ROOT, LocalPool

CORPORA = Path(__file__).parent / "corpora"
PROGRAMS = {"heat": ("--n", "24", "--steps", "30", "--report", "10"),
            "numba_life": ("--n", "24", "--steps", "14"),
            "cudart_saxpy": ("--n", "512", "--rounds", "6")}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="rgpu-record-"))
    with LocalPool(folder, nodes=1) as pool:
        for name, arguments in PROGRAMS.items():
            print(name, pool.run(sys.executable, str(EXAMPLES / f"{name}.py"), *arguments, name=name,
                                 options=("--record", str(folder / "recorded"))).finish(), flush=True)
    for name in PROGRAMS:
        for suffix in (".rgpuj", ".answers"):
            shutil.copyfile(folder / "recorded" / f"{name}{suffix}", CORPORA / f"{name}{suffix}")
    subprocess.run([sys.executable, "-m", "tests.server.worker.apply.test_replaying"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
