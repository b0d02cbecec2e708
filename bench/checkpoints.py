#!/usr/bin/env python3
"""What a checkpoint costs: the pause with and without room on the device, what the next one writes, a restore.

    python bench/checkpoints.py [--device cuda:0] [--mib 1024,16384,65536] [--store /dev/shm/rgpu-bench]

Device and store without a pool: memory of which every word differs is touched, then imaged by the code of workers.
Rows: the first image, with all copies on the device; after 1 % of the pages changed; after scattered bytes changed; all
changed and no room on the device, so that pages are read in the pause; and the restore into a fresh process, from the
page cache. Beside them the driver's own checkpoint and restore of a program with as much memory, in the same run. A
store on a disk measures the disk.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.move_load import BLOCK, CHUNK, PTX  # noqa: E402
from bench.moves import driver_ms  # noqa: E402
from rgpu.checkpoint import cut, restore  # noqa: E402
from rgpu.checkpoint.device import GRANULE, PAGE, Launch  # noqa: E402
from rgpu.checkpoint.frozen import MomentView, look  # noqa: E402
from rgpu.checkpoint.imaging import Imaging  # noqa: E402
from rgpu.checkpoint.state import SessionState  # noqa: E402
from rgpu.checkpoint.store import DirectoryStore  # noqa: E402
from rgpu.server.worker import make_device  # noqa: E402
from rgpu.session.addresses import DEVICE_BASE  # noqa: E402
from tests.gpu.suite.report import environment  # noqa: E402

KEY = bytes(range(32))
TOUCH = 0  #: the first function of the module


class Load:
    """A device with so much memory, of which every word is its own."""

    def __init__(self, spec: str, mib: int, fill: bool = True) -> None:
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
        for address, length in self.chunks:
            self.touch(address, length, number)
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

    def image(self, store: DirectoryStore, name: str, base: str | None, room: int | None = None) -> dict[str, Any]:
        began = time.monotonic()
        imaging = Imaging(self.device, KEY, room)
        with store.writer(name, base, staging=16 << 30) as writer:
            _, counts = imaging.run(writer, self.still, self.take)
        return {**imaging.taken.as_dict(), "total_ms": round((time.monotonic() - began) * 1000, 1),
                "pages": counts["pages"], "raw_bytes": counts["raw_bytes"], "stored_bytes": counts["stored_bytes"]}


def images(spec: str, mib: int, store: DirectoryStore) -> Iterator[dict[str, Any]]:
    load, size = Load(spec, mib), mib << 20
    look(load.device, KEY)  # what is compiled at its first use is compiled

    def row(name: str, found: dict[str, Any]) -> dict[str, Any]:
        held = found["cut_bytes"] + found["paused_bytes"]
        return {"name": name, "size_gib": mib / 1024, **found, "written_share": found["stored_bytes"] / size,
                "pause_gb_per_s": held / found["pause_ms"] / 1e6 if held else None}

    yield row("first", load.image(store, "first", None))
    load.touch_share(0.01, max(PAGE, size // 100 // len(load.chunks) // PAGE * PAGE))
    yield row("1 % of the pages", load.image(store, "part", "first"))
    load.touch_share(0.0005, 1024)  # 1 KiB in each of 3 % of the pages
    yield row("scattered: 1 KiB in each of 3 % of the pages", load.image(store, "scattered", "part"))
    load.touch_all(99)
    yield row("all, no room on the device", load.image(store, "last", "scattered", room=0))
    load.device.close()


def restored(spec: str, mib: int, store: DirectoryStore) -> Iterator[dict[str, Any]]:
    """The image `last` into a fresh device, every page verified."""
    load = Load(spec, mib, fill=False)
    with store.open("last") as image:
        began = time.monotonic()
        pages = image.deliver(load.device.write_pages)
        written = time.monotonic() - began
        restore.finish(load.device, image.state)
    seconds = time.monotonic() - began
    yield {"name": "restore", "size_gib": mib / 1024, "pages": pages, "total_ms": round(seconds * 1000, 1),
            "write_ms": round(written * 1000, 1), "gb_per_s": pages * PAGE / seconds / 1e9}


def show(row: dict[str, Any]) -> str:
    facts = "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                      for name, value in row.items() if name not in ("name", "size_gib") and value is not None)
    return f"{row['size_gib']:6.2f} GiB  {row['name']}: {facts}"


def main() -> int:
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mib", default="1024,16384")
    parser.add_argument("--store", type=Path, default=Path("/dev/shm/rgpu-bench-checkpoints"))
    parser.add_argument("--part", choices=("images", "restore"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    options = parser.parse_args()
    sizes = [int(size) for size in options.mib.split(",")]
    store = DirectoryStore(options.store)
    if options.part:
        rows_of = images if options.part == "images" else restored
        for row in rows_of(options.device, sizes[0], store):
            print(json.dumps(row), flush=True)
        return 0
    rows: list[dict[str, Any]] = []
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{time.strftime('%Y-%m-%d')}-checkpoints.json"
    for mib in sizes:
        own, why = driver_ms("weights", mib) if options.device.startswith("cuda") else (None, "the cpu device")
        print(f"{mib / 1024:6.2f} GiB  the driver's own checkpoint and restore: "
              f"{f'{own:.0f} ms' if own is not None else why}", flush=True)
        shutil.rmtree(options.store, ignore_errors=True)
        try:
            for kind in ("images", "restore"):
                for row in measured(kind, options, mib):
                    rows.append(row | {"driver_ms": own})
                    print(show(row), flush=True)
                    found = {**environment(), "device": options.device, "rows": rows}
                    path.write_text(json.dumps(found, indent=1) + "\n")
        finally:
            shutil.rmtree(options.store, ignore_errors=True)
    print(f"written: {path}")
    return 0


def measured(kind: str, options: argparse.Namespace, mib: int) -> Iterator[dict[str, Any]]:
    """The rows of a process of its own: a device has one session."""
    done = subprocess.Popen([sys.executable, __file__, "--device", options.device, "--mib", str(mib), "--store",
                             str(options.store), "--part", kind], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    for text in done.stdout:
        if text.startswith("{"):
            yield json.loads(text)
    if done.wait():
        raise SystemExit(f"{kind} of {mib} MiB failed with {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
