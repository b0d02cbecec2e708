"""A program that means harm, run where a worker would be: what it tries, and what came of it, as JSON on stdout."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_DETACH, VICTIM_WORD = 16, 17, 8


def called(result: int) -> str:
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "done"


def read(path: str) -> str:
    return f"{len(Path(path).read_bytes())} bytes"


def connect(path: str) -> str:
    """And say something to whoever listens; a worker that believes its daemon at the other end answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect(path)
        sock.send(b"\x82\xa2id\x01\xa2do\xa8describe")  # msgpack: {"id": 1, "do": "describe"}
        answer = sock.recv(1 << 17)
        if not answer:
            raise ConnectionError("closed without an answer")
        return f"{len(answer)} bytes"


def reach(address: tuple[str, int]) -> str:
    socket.create_connection(address, 2).close()
    return "connected"


def abstract(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + name)
        return "connected"


def trace(pid: int) -> str:
    called(LIBC.ptrace(PTRACE_ATTACH, pid, 0, 0))
    os.waitpid(pid, 0)
    LIBC.ptrace(PTRACE_DETACH, pid, 0, 0)
    return "attached"


def memory_of(pid: int, address: int) -> str:
    class Part(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    room = ctypes.create_string_buffer(VICTIM_WORD)
    here, there = Part(ctypes.addressof(room), VICTIM_WORD), Part(address, VICTIM_WORD)
    return called(min(0, LIBC.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)))


def write(path: str) -> str:
    Path(path).write_text("was here")
    return "written"


def attempts(given: dict[str, Any]) -> dict[str, Callable[[], str]]:
    victim, address = given["victim"], given["address"]
    return {
        "the pool's secret": lambda: read(given["secret"]),
        "another worker's token": lambda: read(given["token"]),
        "a file of another worker": lambda: read(given["file"]),
        "another worker's socket": lambda: connect(given["socket"]),
        "a file beside the pool": lambda: write(given["outside"]),
        "the system's passwords": lambda: read("/etc/shadow"),
        "TCP": lambda: reach(tuple(given["tcp"])),
        "an abstract socket": lambda: abstract(given["abstract"]),
        "tracing": lambda: trace(victim),
        "memory by process_vm_readv": lambda: memory_of(victim, address),
        "memory by /proc": lambda: str(os.pread(os.open(f"/proc/{victim}/mem", os.O_RDONLY), VICTIM_WORD, address)),
        "environment by /proc": lambda: read(f"/proc/{victim}/environ"),
        "a signal": lambda: str(os.kill(victim, 0)),
        "a user namespace": lambda: called(LIBC.unshare(0x10000000)),
        "a mount": lambda: called(LIBC.mount(b"none", b"/tmp", b"tmpfs", 0, None)),
        "being root": lambda: called(LIBC.setresuid(0, 0, 0)) + called(LIBC.chroot(b"/")),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    found: dict[str, Any] = {"environment": sorted(os.environ),
                             "fds": sorted(int(name) for name in os.listdir("/proc/self/fd"))}
    results: dict[str, list[str]] = {}
    for name, attempt in attempts(given).items():
        try:
            results[name] = ["got", attempt()]
        except (OSError, ValueError) as error:
            results[name] = ["kept out", str(error)]
    status = Path("/proc/self/status").read_text()
    found["status"] = {line.split(":")[0]: line.split(":")[1].strip() for line in status.splitlines()}
    found["limits"] = Path("/proc/self/limits").read_text()
    found["oom"] = Path("/proc/self/oom_score_adj").read_text().strip()
    found["umask"] = oct(os.umask(0))
    with open(os.path.join(os.environ["TMPDIR"], "mine"), "w") as file:
        file.write("a worker writes in its own folder")
    print(json.dumps({**found, "attempts": results}), flush=True)


if __name__ == "__main__":
    main()
