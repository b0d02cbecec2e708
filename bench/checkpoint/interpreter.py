#!/usr/bin/env python3
"""What storing a checkpoint costs the thread that applies a session's calls, by threads and by processes; no GPU.

    python bench/checkpoint/interpreter.py [--seconds 6] [--threads 6] [--processes 2] [--folder /dev/shm]

The thread does what a worker's applying thread does for each message: opens a sealed one of 4 KiB and makes a call of
C, which lets the interpreter go; it waits 50 µs between two. Meanwhile frames of pages are named, compressed and
stored, as for a checkpoint. Rows: messages a second, by that of the thread alone; bytes stored.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rgpu.checkpoint.codec.chunk import CHUNK_HEADER  # noqa: E402
from rgpu.checkpoint.codec.encoders import Encoders  # noqa: E402
from rgpu.checkpoint.codec.frames import FRAME_PAGES, PITCH, Shared  # noqa: E402
from rgpu.checkpoint.device import PAGE, Region  # noqa: E402
from rgpu.checkpoint.native import pagehash_native  # noqa: E402
from rgpu.checkpoint.pages import pagehash  # noqa: E402
from rgpu.checkpoint.pages.pages import PageList  # noqa: E402
from rgpu.checkpoint.store import writer  # noqa: E402
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore  # noqa: E402

KEY = bytes(range(32))
BASE = 0x2000_0000_0000
FRAMES = 4


def messages(seconds: float) -> float:
    """Messages a second."""
    cipher, libc = AESGCM(bytes(32)), ctypes.CDLL(None)
    sealed, count = cipher.encrypt(bytes(12), bytes(4096), b""), 0
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        cipher.decrypt(bytes(12), sealed, b"")
        libc.usleep(50)
        count += 1
    return count / (time.monotonic() - began)


class Storing:
    """Writes the same frames again and again, each time with other bytes, until it is told to stop."""

    def __init__(self, folder: Path, kind: str, encoders: Encoders | None) -> None:
        self.encoders, self.stored, self.over = encoders, 0, threading.Event()
        self.store = DirectoryStore(folder)
        chance = np.random.default_rng(1)
        self.pages = chance.integers(0, 256, (FRAME_PAGES, PAGE), np.uint8)
        self.mixed = kind == "mixed"  # half of the pages become smaller
        if self.mixed:
            self.pages[::2, ::2] = 0
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        frames = [Shared.make(FRAME_PAGES * PITCH) for _ in range(FRAMES)]
        free, turn = SimpleQueue[int](), 0  # frames come back in any order
        for index in range(FRAMES):
            free.put(index)
        region, expanded = Region(BASE, FRAME_PAGES * PAGE, "mapped"), pagehash.expand_key(KEY)
        maps = [mmap.mmap(memory.fd, memory.size) for memory in frames]
        each = [np.frombuffer(one, np.uint8).reshape(FRAME_PAGES, PITCH) for one in maps]
        with self.store.writer("i", encoders=self.encoders) as checkpoint:
            checkpoint.prepare()
            while not self.over.is_set():
                index, turn = free.get(), turn + 1
                rows, memory = each[index], frames[index]
                start = rows.ctypes.data + CHUNK_HEADER  # a device would fill it, and have hashed it
                for row in range(0, FRAME_PAGES if turn <= FRAMES or self.mixed else 0):
                    ctypes.memmove(start + row * PITCH, self.pages.ctypes.data + row * PAGE, PAGE)
                rows[:, CHUNK_HEADER:CHUNK_HEADER + 8] = np.array([turn], "<u8").view(np.uint8)
                rows[:, CHUNK_HEADER + 8:CHUNK_HEADER + 16] = np.arange(FRAME_PAGES, dtype="<u8").view(
                    np.uint8).reshape(-1, 8)
                hashes = pagehash_native.hash_rows(start, PITCH, FRAME_PAGES, expanded)
                listed = PageList.of([region], [(0, np.arange(FRAME_PAGES), hashes)])
                checkpoint.add_rows(rows, listed, KEY, partial(free.put, index), memory)
                self.stored += FRAME_PAGES * PAGE
        for memory in frames:
            os.close(memory.fd)


def beside(seconds: float, folder: Path, kind: str, encoders: Encoders | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        storing = Storing(Path(place), kind, encoders)
        storing.thread.start()
        time.sleep(1.0)
        before, began = storing.stored, time.monotonic()
        rate = messages(seconds)
        stored = (storing.stored - before) / (time.monotonic() - began)
        storing.over.set()
        storing.thread.join()
    return {"messages_per_s": round(rate), "stored_gb_per_s": round(stored / 1e9, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    writer.THREADS = options.threads
    alone = messages(options.seconds)
    rows: list[dict[str, Any]] = [{"name": "alone", "messages_per_s": round(alone), "of_alone": 1.0}]
    encoders = Encoders(options.processes)
    for kind in ("random", "mixed"):
        for name, where in ((f"{options.threads} threads", None), (f"{options.processes} processes", encoders)):
            row = beside(options.seconds, options.folder, kind, where)
            rows.append({"name": f"{kind} pages, {name}", **row, "of_alone": round(row["messages_per_s"] / alone, 3)})
            print(json.dumps(rows[-1]), flush=True)
    encoders.close()
    out = Path(os.environ.get("OUT") or ROOT / "bench" / "results") / f"{time.strftime('%Y-%m-%d')}-interpreter.json"
    out.write_text(json.dumps({"processors": os.cpu_count(), "command": " ".join(["bench/checkpoint/interpreter.py",
                               *sys.argv[1:]]), "rows": rows}, indent=1) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
