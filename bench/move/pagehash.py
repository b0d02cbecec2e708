#!/usr/bin/env python3
"""How fast the page hash runs: on a GPU over 1, 16 and 64 GiB of random data, and on one core of the host.

    python bench/move/pagehash.py [--device 0] [--output FILE] [--variants]

Prints a table, and one line of JSON for each row (--output writes them to a file
as a list). The data is made on the device by a kernel. `kernel` is the time of one launch, by events around
eleven of them; `call` is the whole of `PageHasher.hash`, results in host memory.
Some pages are fetched and hashed by the host: a difference fails the run.
--variants compiles the kernel with other constants and compares them. Needs
the packages `cuda-bindings` and `nvidia-cuda-nvrtc`; ends within a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUDA_CACHE_DISABLE", "1")  # so that the load times are those of a first start

import numpy as np  # noqa: E402
from cuda.bindings import driver  # noqa: E402

from rgpu.checkpoint.device import PAGE  # noqa: E402
from rgpu.checkpoint.pages import pagehash  # noqa: E402
from rgpu.server.device.cuda.errors import check  # noqa: E402
from rgpu.server.device.cuda.kernels import generate  # noqa: E402
from rgpu.server.device.cuda.memory import pagehash as device_hash  # noqa: E402

KEY = bytes(range(32))
REPEAT = 10
GIB = 1 << 30
TARGET = 4.0  #: TB/s
FILL = """
extern "C" __global__ void fill(unsigned long long* data, unsigned long long count, unsigned long long seed) {
    for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull) {
        unsigned long long x = (i + seed) * 0x9E3779B97F4A7C15ull;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ x >> 27) * 0x94D049BB133111EBull;
        data[i] = x ^ x >> 31;
    }
}
"""


def attribute(number: int, device: Any) -> int:
    return int(check(driver.cuDeviceGetAttribute(driver.CUdevice_attribute(number), device), "cuDeviceGetAttribute"))


@contextmanager
def memory(size: int) -> Iterator[int]:
    address = int(check(driver.cuMemAlloc(size), f"cuMemAlloc of {size // GIB} GiB"))
    try:
        yield address
    finally:
        check(driver.cuMemFree(address), "cuMemFree")


def fill_random(address: int, size: int, architecture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "fill.cu"
        source.write_text(FILL)
        image, _ = generate.compile_source(architecture, source=source)
    module = check(driver.cuModuleLoadData(image), "cuModuleLoadData")
    function = check(driver.cuModuleGetFunction(module, b"fill"), "cuModuleGetFunction")
    device_hash.launch(function, 2048, struct.pack("<QQQ", address, size // 8, 7), driver.CUstream(0))
    check(driver.cuCtxSynchronize(), "filling")
    check(driver.cuModuleUnload(module), "cuModuleUnload")


def milliseconds(work: Callable[[Any], None], repeat: int = REPEAT) -> float:
    """Of one call, on a stream, after a first one that is not counted."""
    stream = check(driver.cuStreamCreate(1), "cuStreamCreate")
    begin, end = (check(driver.cuEventCreate(0), "cuEventCreate") for _ in range(2))
    work(stream)
    check(driver.cuEventRecord(begin, stream), "cuEventRecord")
    for _ in range(repeat):
        work(stream)
    check(driver.cuEventRecord(end, stream), "cuEventRecord")
    check(driver.cuEventSynchronize(end), "cuEventSynchronize")
    found = float(check(driver.cuEventElapsedTime(begin, end), "cuEventElapsedTime")) / repeat
    check(driver.cuStreamDestroy(stream), "cuStreamDestroy")
    return found


class Kernel:
    """One compiled form of the kernels, launched over one range with results in memory of its own."""

    def __init__(self, image: bytes, multiprocessors: int, most_pages: int) -> None:
        self.module = check(driver.cuModuleLoadData(image), "cuModuleLoadData")
        self.functions = [check(driver.cuModuleGetFunction(self.module, name), "cuModuleGetFunction")
                          for name in (b"rgpu_hash_pages", b"rgpu_copy_hash_pages")]
        self.blocks = int(check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            self.functions[0], 32 * device_hash.WARPS, 0), "occupancy"))
        self.resident = self.blocks * device_hash.WARPS * multiprocessors
        self.key = device_hash.packed_key(pagehash.expand_key(KEY))
        self.memory = int(check(driver.cuMemAlloc((1 << 16) + 17 * most_pages), "cuMemAlloc"))
        check(driver.cuMemcpyHtoD(self.memory + 4096, self.key, len(self.key)), "the key")

    def close(self) -> None:
        check(driver.cuMemFree(self.memory), "cuMemFree")
        check(driver.cuModuleUnload(self.module), "cuModuleUnload")

    def time(self, address: int, size: int, per_warp: int = 0, staging: int = 0) -> float:
        pages = size // PAGE
        per_warp = per_warp or device_hash.pages_per_warp(pages, self.resident)
        check(driver.cuMemcpyHtoD(self.memory, struct.pack("<QQQ", address, size, 0), 24), "the segment")
        results = self.memory + (1 << 16)
        parameters = struct.pack("<QIII4xQQQ", self.memory, 1, pages, per_warp, self.memory + 4096, results,
                                 results + 16 * pages) + (struct.pack("<Q", staging) if staging else b"")
        blocks = -(-pages // (device_hash.WARPS * per_warp))
        function = self.functions[bool(staging)]
        return milliseconds(lambda stream: device_hash.launch(function, blocks, parameters, stream))


def sample_agrees(hasher: device_hash.PageHasher, address: int, size: int) -> bool:
    """64 pages of the range, fetched and hashed by the host, against the device's hashes of the whole range."""
    found = hasher.hash([(address, size)], KEY)
    page = np.empty(PAGE, np.uint8)
    for index in np.unique(np.linspace(0, size // PAGE - 1, 64).astype(int)).tolist():
        check(driver.cuMemcpyDtoH(page.ctypes.data, address + index * PAGE, PAGE), "cuMemcpyDtoH")
        if tuple(found.hashes[index].tolist()) != pagehash.hash_page(page, KEY) or found.zero[index]:
            return False
    return len({tuple(row) for row in found.hashes[:1000].tolist()}) == min(1000, size // PAGE)


def device_rows(hasher: device_hash.PageHasher, kernel: Kernel, address: int, sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    for gib in sizes:
        size = gib * GIB
        kernel_ms = kernel.time(address, size)
        calls = []
        for _ in range(5):
            began = time.perf_counter()
            hasher.hash([(address, size)], KEY)
            calls.append((time.perf_counter() - began) * 1e3)
        rows.append({"name": "hash", "size_gib": gib, "kernel_ms": round(kernel_ms, 3),
                     "kernel_tb_s": round(size / kernel_ms / 1e9, 3), "call_ms": round(min(calls), 3),
                     "call_tb_s": round(size / min(calls) / 1e9, 3), "agree": sample_agrees(hasher, address, size)})
    half = sizes[-1] * GIB // 2
    copy_ms = kernel.time(address, half, staging=address + half)
    # What the copy left, hashed again, against the hashes of what was copied.
    copied = hasher.copy_and_hash([(address, half)], address + half, KEY)
    same = np.array_equal(copied.hashes, hasher.hash([(address + half, half)], KEY).hashes)
    rows.append({"name": "copy and hash", "size_gib": half / GIB, "kernel_ms": round(copy_ms, 3),
                 "kernel_tb_s": round(half / copy_ms / 1e9, 3), "agree": bool(same)})
    return rows


def load_times(capability: tuple[int, int]) -> list[dict[str, Any]]:
    """What a worker's start pays for our module, with the driver's cache off."""
    rows = []
    for name in generate.PRODUCTS:
        if name.endswith(".cubin") and capability[0] != 9:
            continue
        data = (generate.FOLDER / name).read_bytes() + b"\0"
        began = time.perf_counter()
        module = check(driver.cuModuleLoadData(data), "cuModuleLoadData")
        check(driver.cuFuncLoad(check(driver.cuModuleGetFunction(module, b"rgpu_hash_pages"), "get")), "cuFuncLoad")
        rows.append({"name": f"load {name}", "milliseconds": round((time.perf_counter() - began) * 1e3, 2)})
        check(driver.cuModuleUnload(module), "cuModuleUnload")
    return rows


def host_row() -> dict[str, Any]:
    data = np.random.default_rng(3).integers(0, 256, 256 << 20, np.uint8)
    best = float("inf")
    for _ in range(4):
        began = time.thread_time()
        pagehash.hash_pages(data, KEY)
        best = min(best, time.thread_time() - began)
    return {"name": "host, one core", "size_gib": 0.25, "gb_s": round(data.nbytes / best / 1e9, 1)}


def variants(address: int, size: int, architecture: str, multiprocessors: int) -> list[dict[str, Any]]:
    rows = []
    for rows_ahead, blocks in ((4, 3), (4, 4), (4, 5), (8, 2), (8, 3), (16, 1), (16, 2)):
        image, _ = generate.compile_source(architecture, (f"-DROWS_AHEAD={rows_ahead}", f"-DBLOCKS_PER_SM={blocks}"))
        kernel = Kernel(image, multiprocessors, size // PAGE)
        for per_warp in (1, 2, 4, 8, 16):
            took = kernel.time(address, size, per_warp)
            rows.append({"name": "variant", "rows_ahead": rows_ahead, "blocks_asked": blocks,
                         "blocks_resident": kernel.blocks, "pages_per_warp": per_warp, "size_gib": size // GIB,
                         "kernel_ms": round(took, 3), "kernel_tb_s": round(size / took / 1e9, 3)})
        kernel.close()
    return rows


def on_gpu(ordinal: int, with_variants: bool) -> list[dict[str, Any]]:
    check(driver.cuInit(0), "cuInit")
    device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
    context = check(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
    check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    capability, multiprocessors = (attribute(75, device), attribute(76, device)), attribute(16, device)
    architecture = f"sm_{capability[0]}{capability[1]}"
    hasher = device_hash.PageHasher(context, capability, multiprocessors)
    free, _ = check(driver.cuMemGetInfo(), "cuMemGetInfo")
    sizes = [gib for gib in (1, 16, 64) if (gib * GIB) + GIB < int(free)]
    print(f"{check(driver.cuDeviceGetName(64, device), 'name').split(bytes(1))[0].decode()}: {multiprocessors} "
          f"multiprocessors, {hasher.loaded_from}")
    rows = load_times(capability)
    with memory(sizes[-1] * GIB) as address:
        fill_random(address, sizes[-1] * GIB, architecture)
        kernel = Kernel((generate.FOLDER / hasher.loaded_from).read_bytes() + b"\0", multiprocessors,
                        sizes[-1] * GIB // PAGE)
        rows += device_rows(hasher, kernel, address, sizes)
        kernel.close()
        if with_variants:
            fill_random(address, sizes[-1] * GIB, architecture)
            rows += variants(address, min(16, sizes[-1]) * GIB, architecture, multiprocessors)
    hasher.close()
    driver.cuDevicePrimaryCtxRelease(device)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--variants", action="store_true", help="compare other constants of the kernel")
    parser.add_argument("--host-only", action="store_true", help="no GPU: the host's figure alone")
    arguments = parser.parse_args()
    rows = [] if arguments.host_only else on_gpu(arguments.device, arguments.variants)
    rows.append(host_row())
    columns = ("name", "size_gib", "kernel_ms", "kernel_tb_s", "call_ms", "call_tb_s", "gb_s", "milliseconds", "agree",
               "rows_ahead", "blocks_resident", "pages_per_warp")
    columns = tuple(column for column in columns if any(column in row for row in rows))
    width = {column: max(len(column), *(len(str(row.get(column, ""))) for row in rows)) for column in columns}
    for line in ({column: column for column in columns}, *rows):
        print("  ".join(str(line.get(column, "")).ljust(width[column]) for column in columns).rstrip())
    for row in rows:
        print(json.dumps(row))
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [row for row in rows if row.get("agree") is False]
    full = [row for row in rows if row["name"] == "hash"]
    if full:
        print(f"target of {TARGET} TB/s over {full[-1]['size_gib']} GiB: "
              f"{'met' if full[-1]['kernel_tb_s'] >= TARGET else 'missed'} with {full[-1]['kernel_tb_s']} TB/s")
    if wrong:
        print(f"device and host disagree: {wrong}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
