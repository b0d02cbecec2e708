"""A process that imports one archive, whose content is untrusted, into a user's part of the store.

It has the user's key and no other, limits of memory and processor time of its own, and ends with its daemon. So a
malicious archive that expands or decodes slowly fails with an error for its owner and costs other users nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rgpu.checkpoint.store.archive import ArchiveReader, copy_checkpoint
from rgpu.checkpoint.store.grants import Grant, granted
from rgpu.session.errors import LimitReached, RgpuError, from_dict

#: Address space: for an archive's table of pages, a few packs, and the libraries.
MEMORY = 4 << 30
#: Processor time: at 20 MiB/s, with a minute for a small archive.
CPU_SECONDS, BYTES_A_SECOND = 60, 20 << 20
PATIENCE = 1800.0  #: s, for all of it
_PR_SET_PDEATHSIG = 1


def take_in(path: Path, grant: Grant, name: str) -> dict[str, Any]:
    """Have a process import the archive; return a description of the checkpoint. Blocks.

    Raises the process's error about the archive or the store, :class:`LimitReached` where it reached its limits.
    """
    seconds = CPU_SECONDS + path.stat().st_size // BYTES_A_SECOND
    job = json.dumps({"path": str(path), "name": name, "values": {**grant.values, "key": grant.values["key"].hex()},
                      "descriptors": list(grant.descriptors), "seconds": seconds})
    process = subprocess.Popen([sys.executable, "-m", "rgpu.server.node.store.take_in"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=grant.descriptors,
                               start_new_session=True)
    try:
        out, _ = process.communicate(job.encode(), timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise LimitReached(f"the archive was not taken in within {PATIENCE:.0f} s") from None
    try:
        answer = json.loads(out)
    except ValueError:
        how = signal.Signals(-process.returncode).name if process.returncode < 0 else str(process.returncode)
        raise LimitReached(f"the process that read the archive ended ({how}): it may have {MEMORY >> 20} MiB of memory "
                           f"and {seconds} s of processor time for this one") from None
    if "error" in answer:
        raise from_dict(answer)
    return dict(answer["taken"])


def _limit(seconds: int) -> None:
    """Limit this process's memory, processor time and priority; it is killed when its daemon ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(10)


def _do(job: dict[str, Any]) -> dict[str, Any]:
    values = {**job["values"], "key": bytes.fromhex(job["values"]["key"])}
    with granted(values, list(job["descriptors"])) as checkpoints, ArchiveReader(Path(job["path"])) as archive:
        checkpoint = archive.checkpoint()
        name = str(job["name"] or checkpoint.name)
        counts = copy_checkpoint(checkpoint, checkpoints.own, name)
        return {"image": name, "session": checkpoint.state.session, "position": checkpoint.state.position,
                "pages": counts["pages"], "bytes": counts["stored_bytes"]}


def main() -> None:
    """Run the process: read the job from standard input, write the answer to standard output."""
    job = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        _limit(int(job["seconds"]))
        answer = {"taken": _do(job)}
    except RgpuError as error:
        answer = json.loads(json.dumps(error.as_dict(), default=str))
    except MemoryError:
        answer = LimitReached(f"reading the archive takes more than {MEMORY >> 20} MiB of memory").as_dict()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
