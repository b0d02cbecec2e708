#!/usr/bin/env python3
"""How long writing a manifest, and reading the previous one, stop every other thread of a worker; no GPU.

    python bench/checkpoint/manifest.py [--mib 64,128,256]

A session's modules stand whole in its manifest. For so many MiB of them: encoding in one go and in pieces, decoding
whole and for the next checkpoint (the pages alone); milliseconds of each, and the longest that a thread which only
sleeps half a millisecond at a time had to wait meanwhile: it needs the interpreter, as the thread that applies calls
does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rgpu.checkpoint.device import PAGE  # noqa: E402
from rgpu.checkpoint.manifest import manifest  # noqa: E402
from rgpu.checkpoint.manifest.state import RegionState, SessionState  # noqa: E402
from rgpu.checkpoint.pages import pagehash  # noqa: E402

KEY = bytes(32)
CONTENT, REGION, REGIONS = 4 << 20, 64 << 20, 96  #: bytes of a module, of a region; how many regions
NAP = 0.0005


class Sleeper:
    """Another thread of the worker."""

    def __init__(self) -> None:
        self.longest = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(NAP)
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last - NAP), now


def body_with(mib: int) -> manifest.Body:
    pages = REGION // PAGE
    regions = [RegionState(0x2000_0000_0000 + index * REGION, REGION, "mapped", hashes=os.urandom(16 * pages))
               for index in range(REGIONS)]
    live = {"version": 1, "position": 5, "answers": [], "calls": [[seq, 3, 1, 0, b"x" * 40, -1] for seq in range(5000)],
            "payloads": [os.urandom(CONTENT) for _ in range((mib << 20) // CONTENT)]}
    state = SessionState(session="s", epoch=1, position=5, hash_key=bytes(pagehash.KEY_BYTES), regions=regions,
                         live=live)
    return manifest.Body(image="i", created=0.0, state=state, packs=[], chunks=manifest.Chunks(b"", b"", b"", b""),
                      pages=[manifest.ZERO_PAGE.to_bytes(4, "little") * pages] * REGIONS)


def in_one_go(body: manifest.Body) -> bytes:
    """As it was done first: encoded, put behind its head, summed."""
    summary = msgspec.msgpack.encode(body.summary())
    data = summary + msgspec.msgpack.encode(body)
    return manifest._checksum(data, key=KEY) + data


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", default="64,128,256")
    options = parser.parse_args()
    sleeper, rows = Sleeper(), list[dict[str, Any]]()
    for mib in map(int, options.mib.split(",")):
        body = body_with(mib)
        data = manifest.encode(body, KEY)
        ways: dict[str, Callable[[], Any]] = {
            "encode in one go": lambda body=body: in_one_go(body),
            "encode in pieces": lambda body=body: manifest.encode_pieces(body, KEY),
            "decode whole": lambda data=data: manifest.decode(data, KEY, "i"),
            "decode the pages alone": lambda data=data: manifest.decode(data, KEY, "i", pages_alone=True)}
        for name, do in ways.items():
            time.sleep(0.2)
            sleeper.longest, began = 0.0, time.monotonic()
            do()
            took = time.monotonic() - began
            time.sleep(0.05)
            rows.append({"name": name, "mib": mib, "ms": round(took * 1e3, 1),
                         "others_waited_ms": round(sleeper.longest * 1e3, 1)})
            print(json.dumps(rows[-1]), flush=True)
    out = Path(os.environ.get("OUT") or ROOT / "bench" / "results") / f"{time.strftime('%Y-%m-%d')}-manifest.json"
    out.write_text(json.dumps({"processors": os.cpu_count(), "command": " ".join(["bench/checkpoint/manifest.py",
                               *sys.argv[1:]]), "rows": rows}, indent=1) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
