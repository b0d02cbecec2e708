"""How much of libraries' fat binaries goes to the server: the shim's own slimming, applied to files.

    python bench/remote/module_sizes.py --capability 9.0 LIBRARY…

LIBRARY is a shared library, or a wheel that holds some. Every fat binary in it is taken whole, as
the runtime hands it to the driver, and compared with what the client sends for it. Those without
code for the device are counted apart: a program does not load them, and the client refuses them
unsent. A C++ compiler is needed.
"""

from __future__ import annotations

import argparse
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.shim.fatbins import ELF, MAGIC, PTX, Slimmer, unpack

HEADER = struct.Struct("<IHHQ")
ENTRY_HEADER = struct.Struct("<HHIQ")
MAGIC_BYTES = struct.pack("<I", MAGIC)


def fat_binaries(data: bytes) -> Iterator[bytes]:
    """Every well-formed fat binary in a file."""
    at = data.find(MAGIC_BYTES)
    while at >= 0:
        binary = _fat_binary(data, at)
        if binary:
            yield binary
        at = data.find(MAGIC_BYTES, at + (len(binary) or 4))


def _fat_binary(data: bytes, start: int) -> bytes:
    if len(data) - start < HEADER.size:
        return b""
    _, version, header, size = HEADER.unpack_from(data, start)
    at, end = start + header, start + header + size
    if version != 1 or header < HEADER.size or not at < end <= len(data):
        return b""
    while at < end:
        if end - at < 64:
            return b""
        _, _, length, payload = ENTRY_HEADER.unpack_from(data, at)
        if length < 64 or length + payload > end - at:
            return b""
        at += length + payload
    return data[start:end]


def may_run(binary: bytes, major: int, minor: int) -> bool:
    """As the shim decides before it sends anything (fatbin.cpp, may_run_on)."""
    device = major * 10 + minor
    return any(part.architecture <= device and (part.kind == PTX or part.architecture // 10 == major)
               for part in unpack(binary) if part.kind in (PTX, ELF))


def libraries(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of a library, or of every shared library in a wheel."""
    if path.suffix != ".whl":
        yield path.name, path.read_bytes()
        return
    with zipfile.ZipFile(path) as wheel:
        for item in wheel.infolist():
            if ".so" in Path(item.filename).suffixes or item.filename.endswith(".so"):
                yield f"{path.name.split('-')[0]}/{Path(item.filename).name}", wheel.read(item)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", default="9.0", help="compute capability of the device")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    major, minor = (int(part) for part in options.capability.split("."))
    totals = [0, 0, 0, 0]
    print(f"{'library':56} {'cannot run':>10} {'can run':>8} {'MiB whole':>10} {'MiB sent':>9} {'sent':>5}")
    with tempfile.TemporaryDirectory() as folder:
        slimmer = Slimmer(Path(folder))
        for path in options.files:
            for name, data in libraries(path):
                row = [0, 0, 0, 0]
                for binary in fat_binaries(data):
                    if not may_run(binary, major, minor):
                        row[0] += 1
                        continue
                    sent = len(slimmer.slim(binary, (major, minor)))
                    row = [row[0], row[1] + 1, row[2] + len(binary), row[3] + sent]
                if row[0] or row[1]:
                    _show(name, row)
                    totals = [a + b for a, b in zip(totals, row, strict=True)]
    _show("together", totals)


def _show(name: str, row: list[int]) -> None:
    share = f"{row[3] / row[2]:5.0%}" if row[2] else "    -"
    print(f"{name[-56:]:56} {row[0]:10} {row[1]:8} {row[2] / 2**20:10.1f} {row[3] / 2**20:9.1f} {share}")


if __name__ == "__main__":
    main()
