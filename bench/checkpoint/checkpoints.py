#!/usr/bin/env python3
"""What a checkpoint costs: the pause with and without room on the device, what the next one writes, a restore.

    python bench/checkpoint/checkpoints.py [--device cuda:0] [--mib 1024,16384,65536] [--unique 1024,4096] \
        [--seconds 150]

Device and store without a pool: memory of which every word differs is touched, then checkpointed by the code of
workers. Rows: the first checkpoint, with all copies on the device; after 1 % of the pages changed; after scattered
bytes changed; all changed and no room on the device, so that pages go to pinned host memory in the pause; and the
restore into a fresh process, from the page cache. Of --mib the memory repeats itself after 256 MiB, so that its store
fits into memory: the pause copies all of it, the store has it once. Of --unique no two pages are equal and none can be
compressed: these rows say what storing costs. Beside them the driver's own checkpoint and restore of a program with as
much memory, in the same run, for the sizes that --seconds leave time for. A store on a disk measures the disk.

Parts of a pause: hash (of every page), state (taken, and compared with the previous checkpoint), room (memory of the
device taken in the pause), copy (on the device), read (to the host). Before it: prepare (the estimate of what will have
to be copied, and memory for that). Of a restore: read (with the names of the bytes against those of the chunks, by
processes where there are enough processors) and copy are ms of all its threads together, verify is the hash of every
page on the device; pages of zeros cost nothing, fresh memory is zeros. That of --unique is done twice, the second time
without comparing names, by threads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.move.move_load import BLOCK, CHUNK, PTX  # noqa: E402
from bench.move.moves import driver_ms  # noqa: E402
from rgpu.checkpoint.codec import encoders  # noqa: E402
from rgpu.checkpoint.codec.encoding import prepare as prepare_native  # noqa: E402
from rgpu.checkpoint.codec.frames import KEPT  # noqa: E402
from rgpu.checkpoint.device import GRANULE, PAGE, Launch  # noqa: E402
from rgpu.checkpoint.manifest import cut  # noqa: E402
from rgpu.checkpoint.manifest.state import SessionState  # noqa: E402
from rgpu.checkpoint.pages.frozen import MomentView, look  # noqa: E402
from rgpu.checkpoint.session import restore  # noqa: E402
from rgpu.checkpoint.session.checkpointing import Checkpointing  # noqa: E402
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore  # noqa: E402
from rgpu.checkpoint.store.delivery import Delivery  # noqa: E402
from rgpu.checkpoint.store.writer import STAGING  # noqa: E402
from rgpu.server.device.cpu.facts import available_memory  # noqa: E402
from rgpu.server.device.spec import make_device  # noqa: E402
from rgpu.session.addresses import DEVICE_BASE  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402

KEY = bytes(range(32))
TOUCH = 0  #: the first function of the module
DRIVER_SECONDS = 0.75  #: that the driver's own checkpoint and restore take for each GiB, with the program's start


class Load:
    """A device with so much memory. ``unique``: no two of its pages are equal; else the same for each CHUNK bytes."""

    def __init__(self, spec: str, mib: int, fill: bool = True, unique: bool = False) -> None:
        self.unique = unique
        self.device: Any = make_device(spec, (mib << 20) + (64 << 20))
        self.seq = 0
        self.device.create_context(16, 0, True)
        size = max(GRANULE, mib << 20)
        self.chunks = [(DEVICE_BASE + at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)]
        for address, length in self.chunks:
            self.device.map(address, length)
            self.device.allocate(address, length)
        self.device.load(17, PTX, b"", False)
        if fill:
            for number in (7, 13):
                self.touch_all(number)

    def touch(self, address: int, size: int, number: int) -> None:
        self.seq += 1
        count = size // 4
        self.device.launch(self.seq, Launch(17, TOUCH, (-(-count // BLOCK), 1, 1), (BLOCK, 1, 1), 0, 0,
                                            struct.pack("<QII", address, count, number)))

    def touch_all(self, number: int) -> None:
        for which, (address, length) in enumerate(self.chunks):
            self.touch(address, length, number + which if self.unique else number)
        self.drain()

    def touch_share(self, share: float, run: int) -> None:
        """So much of each chunk, in runs of so many bytes, evenly spread."""
        for address, length in self.chunks:
            runs = max(1, int(length * share / run))
            for number in range(runs):
                self.touch(address + number * (length // runs) // 256 * 256, run, self.seq)
        self.drain()

    def drain(self) -> None:
        assert self.device.drain(600) and not self.device.error

    @contextmanager
    def still(self) -> Iterator[None]:
        self.drain()
        yield

    def take(self, view: MomentView) -> SessionState:
        return cut.take(view, session="bench", epoch=1, position=1, hash_key=KEY, live={})  # type: ignore[arg-type]

    def checkpoint(self, store: DirectoryStore, name: str, base: str | None, room: int | None = None) -> dict[str, Any]:
        began = time.monotonic()
        checkpointing = Checkpointing(self.device, KEY, room)
        # As a worker's own limit, but that all of this process's memory may find room.
        staging = max(STAGING, min(available_memory() * 3 // 4, sum(size for _, size in self.chunks) * 9 // 8))
        with store.writer(name, base, staging=staging) as writer:
            _, counts = checkpointing.run(writer, self.still, self.take)
        total = time.monotonic() - began
        return {**checkpointing.taken.as_dict(), "total_ms": round(total * 1000, 1),
                "pages": counts["pages"], "raw_bytes": counts["raw_bytes"], "stored_bytes": counts["stored_bytes"],
                "stored_gb_per_s": counts["stored_bytes"] / total / 1e9}


def checkpoints(spec: str, mib: int, store: DirectoryStore, unique: bool) -> Iterator[dict[str, Any]]:
    load, size = Load(spec, mib, unique=unique), mib << 20
    look(load.device, KEY)  # what is compiled at its first use is compiled

    def row(name: str, found: dict[str, Any]) -> dict[str, Any]:
        held = found["cut_bytes"] + found["paused_bytes"]
        return {"name": name, "size_gib": mib / 1024, "unique": unique, **found,
                "written_share": found["stored_bytes"] / size,
                "pause_gb_per_s": held / found["pause_ms"] / 1e6 if held else None}

    yield row("first", load.checkpoint(store, "first", None))
    newest = "first"
    if not unique:
        load.touch_share(0.01, max(PAGE, size // 100 // len(load.chunks) // PAGE * PAGE))
        yield row("1 % of the pages", load.checkpoint(store, "part", "first"))
        load.touch_share(0.0005, 1024)  # 1 KiB in each of 3 % of the pages
        yield row("scattered: 1 KiB in each of 3 % of the pages", load.checkpoint(store, "scattered", "part"))
        newest = "scattered"
    load.touch_all(99)
    yield row("all, no room on the device", load.checkpoint(store, "last", newest, room=0))
    load.device.close()


def restored(spec: str, mib: int, store: DirectoryStore, unique: bool) -> Iterator[dict[str, Any]]:
    """The checkpoint `last` into a fresh device, every page verified; then again, its chunks' names not checked."""
    began = time.monotonic()
    load = Load(spec, mib, fill=False)
    load.device.frames().prepare(KEPT)  # as a warm worker has them
    prepare_native()
    encoders.get_ready()
    time.sleep(2.0)  # a warm worker's have started long before it is needed
    look(load.device, KEY)
    made = time.monotonic() - began
    for names in (True, False) if unique else (True,):
        yield restored_once(load, mib, store, unique, names, made)
    load.device.close()


def restored_once(load: Load, mib: int, store: DirectoryStore, unique: bool, names: bool, made: float,
                  ) -> dict[str, Any]:
    began = time.monotonic()
    with store.open("last") as checkpoint, encoders.for_restore(mib << 20) as checkpoint.processes:
        opened = time.monotonic() - began
        delivery = Delivery(checkpoint, load.device, names, checkpoint.processes)
        pages = delivery.run()
        written = time.monotonic() - began
        restore.finish(load.device, checkpoint.state, blame=delivery.blame)
        seconds = time.monotonic() - began
    return {"name": "restore" if names else "restore, chunks' names not checked",
            "size_gib": mib / 1024, "unique": unique, "pages": pages,
            "total_ms": round(seconds * 1000, 1), "device_ms": round(made * 1000, 1),
            "open_ms": round(opened * 1000, 1), "write_ms": round((written - opened) * 1000, 1),
            "verify_ms": round((seconds - written) * 1000, 1),
            "read_thread_ms": round(delivery.times["read"] * 1000, 1),
            "copy_thread_ms": round(delivery.times["copy"] * 1000, 1), "gb_per_s": pages * PAGE / seconds / 1e9}


def show(row: dict[str, Any]) -> str:
    left_out = ("name", "size_gib", "unique")
    facts = "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                      for name, value in row.items() if name not in left_out and value is not None)
    return f"{row['size_gib']:6.2f} GiB{' unique' if row['unique'] else ''}  {row['name']}: {facts}"


def main() -> int:
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mib", default="1024,16384")
    parser.add_argument("--unique", default="1024,4096", help="MiB of memory without equal pages; empty: none")
    parser.add_argument("--seconds", type=float, default=150, help="after which no driver's own checkpoint is begun")
    parser.add_argument("--store", type=Path, default=Path("/dev/shm/rgpu-bench-checkpoints"))
    parser.add_argument("--part", choices=("checkpoints", "restore"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    sizes, unique = ([int(size) for size in text.split(",") if size] for text in (options.mib, options.unique))
    store = DirectoryStore(options.store)
    if options.part:
        rows_of = checkpoints if options.part == "checkpoints" else restored
        for row in rows_of(options.device, (sizes or unique)[0], store, not sizes):
            print(json.dumps(row), flush=True)
        return 0
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{time.strftime('%Y-%m-%d')}-checkpoints.json"

    def keep() -> None:
        path.write_text(json.dumps({**environment(), "device": options.device, "rows": rows}, indent=1) + "\n")

    for mib, alone in sorted([(mib, False) for mib in sizes] + [(mib, True) for mib in unique]):
        shutil.rmtree(options.store, ignore_errors=True)
        try:
            for kind in ("checkpoints", "restore"):
                for row in measured(kind, options, mib, alone):
                    rows.append(row)
                    print(show(row), flush=True)
                    keep()
        finally:
            shutil.rmtree(options.store, ignore_errors=True)
    for mib in sorted(sizes):
        drivers(mib, options, began, rows)
        keep()
    print(f"written: {path}  ({time.monotonic() - began:.0f} s)")
    return 0


def drivers(mib: int, options: argparse.Namespace, began: float, rows: list[dict[str, Any]]) -> None:
    """The driver's own checkpoint and restore of as much memory, beside the rows of that size."""
    if not options.device.startswith("cuda"):
        return
    needed = DRIVER_SECONDS * mib / 1024
    if time.monotonic() - began + needed > options.seconds:
        print(f"{mib / 1024:6.2f} GiB  the driver's own: left out, it would take about {needed:.0f} s", flush=True)
        return
    own, why = driver_ms("weights", mib)
    print(f"{mib / 1024:6.2f} GiB  the driver's own checkpoint and restore: "
          f"{f'{own:.0f} ms' if own is not None else why}", flush=True)
    for row in rows:
        if row["size_gib"] == mib / 1024:
            row["driver_ms"] = own


def measured(kind: str, options: argparse.Namespace, mib: int, unique: bool) -> Iterator[dict[str, Any]]:
    """The rows of a process of its own: a device has one session."""
    done = subprocess.Popen([sys.executable, __file__, "--device", options.device, "--mib", "" if unique else str(mib),
                             "--unique", str(mib) if unique else "", "--store", str(options.store), "--part", kind],
                            cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    for text in done.stdout:
        if text.startswith("{"):
            yield json.loads(text)
    if done.wait():
        raise SystemExit(f"{kind} of {mib} MiB failed with {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
