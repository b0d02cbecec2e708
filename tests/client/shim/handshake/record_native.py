"""Records what a real driver answers, as the reference for the shim's local answers.

Run on a machine with a GPU: ``python record_native.py symbols.txt > native.json``.
Uses ctypes alone, so that it needs nothing but Python, the driver, and its two
neighbours native_driver.py and record_native_modules.py. The
recording that the tests compare with stands beside this file.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from native_driver import Driver  # beside this file, wherever it was copied to
from record_native_modules import modules


def errors(d: Driver) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for code in [*range(0, 1001), -1]:
        row = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = c.c_char_p(b"untouched")
            result = getattr(d, function)(code, c.byref(text))
            row.append([result, text.value.decode() if text.value is not None else None])
        if row[0][0] == 0 or code in (35, 1000, -1):
            out[str(code)] = row
    return out


def proc_address(d: Driver, names: list[str]) -> dict[str, Any]:
    addresses: dict[int, list[str]] = {}
    for name in names:
        try:
            addresses.setdefault(c.cast(getattr(d.library, name), c.c_void_p).value or 0, []).append(name)
        except AttributeError:
            pass
    bases = sorted({n for n in names})
    out: dict[str, Any] = {}
    for name in bases:
        row = {}
        previous = None
        for version in (
            2000,
            2010,
            2020,
            3000,
            3010,
            3020,
            4000,
            4010,
            5000,
            5050,
            6000,
            6050,
            7000,
            8000,
            9000,
            9020,
            10000,
            10010,
            10020,
            11000,
            11010,
            11020,
            11030,
            11040,
            11060,
            11070,
            11080,
            12000,
            12010,
            12020,
            12030,
            12040,
            12050,
            12060,
            12080,
            12090,
            13000,
        ):
            answers = []
            for flags in (0, 1, 2):
                pointer, status = c.c_void_p(0xDEAD), c.c_int(-7)
                result = d.cuGetProcAddress_v2(
                    name.encode(), c.byref(pointer), version, c.c_uint64(flags), c.byref(status)
                )
                answers.append(
                    [result, status.value, addresses.get(pointer.value or 0, ["?"]) if pointer.value else None]
                )
            if answers != previous:
                row[str(version)] = answers
                previous = answers
        out[name] = row
    return out


def proc_address_edges(d: Driver) -> dict[str, Any]:
    out = {}
    cases = {
        "unknown": (b"cuNoSuchThing", 12000, 0),
        "empty": (b"", 12000, 0),
        "future": (b"cuInit", 99000, 0),
        "flags4": (b"cuInit", 12000, 4),
        "flags3": (b"cuInit", 12000, 3),
        "version0": (b"cuInit", 0, 0),
        "suffixed": (b"cuMemAlloc_v2", 12000, 0),
        "old": (b"cuMemAllocAsync", 11000, 0),
    }
    for key, (name, version, flags) in cases.items():
        pointer, status = c.c_void_p(0xDEAD), c.c_int(-7)
        r2 = d.cuGetProcAddress_v2(name, c.byref(pointer), version, c.c_uint64(flags), c.byref(status))
        one = c.c_void_p(0xDEAD)
        r1 = d.cuGetProcAddress(name, c.byref(one), version, c.c_uint64(flags))
        out[key] = {
            "v2": [r2, status.value, pointer.value == 0xDEAD, bool(pointer.value)],
            "v1": [r1, one.value == 0xDEAD, bool(one.value)],
        }
    pointer = c.c_void_p(0)
    out["null_status"] = d.cuGetProcAddress_v2(b"cuNoSuchThing", c.byref(pointer), 12000, c.c_uint64(0), None)
    return out


def before_init(d: Driver) -> dict[str, Any]:
    current = c.c_void_p(1)
    return {
        "count": d.value("cuDeviceGetCount"),
        "current": d.cuCtxGetCurrent(c.byref(current)),
        "current_value": current.value,
        "version": d.value("cuDriverGetVersion"),
        "loading": d.value("cuModuleGetLoadingMode"),
        "set_current": d.cuCtxSetCurrent(None),
        "init_flags_1": d.cuInit(1),
        "get_device": d.value("cuCtxGetDevice"),
        "init": d.cuInit(0),
    }


def devices(d: Driver) -> dict[str, Any]:
    d.cuInit(0)
    name = c.create_string_buffer(256)
    short = c.create_string_buffer(b"\xff" * 16, 16)
    bus = c.create_string_buffer(b"\xff" * 64, 64)
    out: dict[str, Any] = {"attributes": {i: d.value("cuDeviceGetAttribute", i, 0) for i in range(0, 160)}}
    out["name"] = [d.cuDeviceGetName(name, 256, 0), name.value.decode()]
    out["name_short"] = [d.cuDeviceGetName(short, 5, 0), short.raw.hex()]
    out["bus"] = [d.cuDeviceGetPCIBusId(bus, 64, 0), bus.raw.hex()]
    for size in (0, 1, 5, 12, 13, 14):
        small = c.create_string_buffer(b"\xff" * 64, 64)
        out[f"bus{size}"] = [d.cuDeviceGetPCIBusId(small, size, 0), small.raw[:20].hex()]
    text = bus.value.decode()
    trials = {
        "same": text,
        "lower": text.lower(),
        "short": text[5:] if text[4] == ":" else text[-7:],
        "nofunction": text[:-2],
        "bad": "zz",
        "absent": "0000:ff:1f.0",
    }
    out["by_bus"] = {k: [v, d.value("cuDeviceGetByPCIBusId", v.encode())] for k, v in trials.items()}
    out["get"] = {i: d.value("cuDeviceGet", i) for i in (-1, 0, 1, 100)}
    out["bad_device"] = [
        d.value("cuDeviceGetAttribute", 1, 77),
        d.value("cuDeviceGetAttribute", 1, -1),
        d.value("cuDeviceTotalMem_v2", 77, kind=c.c_size_t),
    ]
    out["null"] = [d.cuDeviceGetCount(None), d.cuDeviceGet(None, 0)]
    out["peer_self"] = d.value("cuDeviceCanAccessPeer", 0, 0)
    out["p2p_self"] = d.value("cuDeviceGetP2PAttribute", 1, 0, 0)
    out["affinity"] = [d.value("cuDeviceGetExecAffinitySupport", i, 0) for i in (0, 1)]
    return out


def contexts(d: Driver) -> dict[str, Any]:
    d.cuInit(0)
    out: dict[str, Any] = {}
    handle, other, flags, active = c.c_void_p(0), c.c_void_p(7), c.c_uint(0), c.c_int(0)

    def state() -> list[int]:
        return [d.cuDevicePrimaryCtxGetState(0, c.byref(flags), c.byref(active)), flags.value, active.value]

    def current() -> list[Any]:
        now = c.c_void_p(0)
        result = d.cuCtxGetCurrent(c.byref(now))
        return [result, None if not now.value else "primary" if now.value == handle.value else "other"]

    out["state0"], out["current0"] = state(), current()
    out["none"] = {
        "device": d.value("cuCtxGetDevice"),
        "sync": d.cuCtxSynchronize(),
        "pop": d.cuCtxPopCurrent_v2(c.byref(other)),
        "limit": d.value("cuCtxGetLimit", 0, kind=c.c_size_t),
        "flags": d.value("cuCtxGetFlags"),
        "priority": d.cuCtxGetStreamPriorityRange(c.byref(c.c_int()), c.byref(c.c_int())),
        "cache": d.value("cuCtxGetCacheConfig"),
        "api": d.cuCtxGetApiVersion(None, c.byref(flags)),
        "id": d.cuCtxGetId(None, c.byref(c.c_uint64())),
        "destroy_null": d.cuCtxDestroy_v2(None),
        "push_null": d.cuCtxPushCurrent_v2(None),
        "alloc": d.cuMemAlloc_v2(c.byref(c.c_void_p()), c.c_size_t(4)),
        "release": d.cuDevicePrimaryCtxRelease_v2(0),
        "reset": d.cuDevicePrimaryCtxReset_v2(0),
    }
    out["set_flags"] = {v: d.cuDevicePrimaryCtxSetFlags_v2(0, v) for v in (0, 1, 4, 8, 3, 5, 16, 32, 64, 128, 256)}
    d.cuDevicePrimaryCtxSetFlags_v2(0, 0)
    out["retain"] = [d.cuDevicePrimaryCtxRetain(c.byref(handle), 0), state(), current()]
    out["set"] = [d.cuCtxSetCurrent(handle), current(), d.value("cuCtxGetDevice")]
    out["set_flags_active"] = [d.cuDevicePrimaryCtxSetFlags_v2(0, 1), state(), d.value("cuCtxGetFlags")]
    out["set_flags_active0"] = [d.cuDevicePrimaryCtxSetFlags_v2(0, 0), state()]
    out["limits"] = {i: d.value("cuCtxGetLimit", i, kind=c.c_size_t) for i in range(-1, 12)}
    out["set_limits"] = {
        f"{i}={v}": [d.cuCtxSetLimit(i, c.c_size_t(v)), d.value("cuCtxGetLimit", i, kind=c.c_size_t)]
        for i, v in (
            (0, 4096),
            (0, 5000),
            (0, 1 << 30),
            (1, 1 << 20),
            (2, 1 << 24),
            (3, 2),
            (4, 100),
            (5, 32),
            (6, 0),
            (9, 1),
        )
    }
    low, high = c.c_int(9), c.c_int(9)
    out["priority"] = [d.cuCtxGetStreamPriorityRange(c.byref(low), c.byref(high)), low.value, high.value]
    version, ident = c.c_uint(0), c.c_uint64(0)
    out["api"] = [
        d.cuCtxGetApiVersion(handle, c.byref(version)),
        version.value,
        d.cuCtxGetApiVersion(None, c.byref(version)),
    ]
    out["id"] = [d.cuCtxGetId(handle, c.byref(ident)), ident.value]
    out["cache"] = [
        d.value("cuCtxGetCacheConfig"),
        d.cuCtxSetCacheConfig(1),
        d.value("cuCtxGetCacheConfig"),
        d.cuCtxSetCacheConfig(9),
    ]
    out["shared"] = [d.value("cuCtxGetSharedMemConfig"), d.cuCtxSetSharedMemConfig(1), d.cuCtxSetSharedMemConfig(9)]
    out["flags"] = [
        d.value("cuCtxGetFlags"),
        d.cuCtxSetFlags(4),
        d.value("cuCtxGetFlags"),
        d.cuCtxSetFlags(16),
        d.value("cuCtxGetFlags"),
        d.cuCtxSetFlags(0),
    ]
    out["push"] = [
        d.cuCtxPushCurrent_v2(handle),
        current(),
        d.cuCtxPopCurrent_v2(c.byref(other)),
        other.value == handle.value,
        current(),
    ]
    created = c.c_void_p(0)
    out["create"] = [
        d.cuCtxCreate_v2(c.byref(created), 0, 0),
        current(),
        d.cuCtxGetApiVersion(created, c.byref(version)),
        version.value,
        d.cuCtxGetId(created, c.byref(ident)),
        ident.value,
        d.value("cuCtxGetFlags"),
    ]
    out["create_bad"] = [
        d.cuCtxCreate_v2(c.byref(c.c_void_p()), 3, 0),
        d.cuCtxCreate_v2(c.byref(c.c_void_p()), 0, 9),
        d.cuCtxCreate_v2(None, 0, 0),
        d.cuCtxCreate_v2(c.byref(c.c_void_p()), 1024, 0),
    ]
    out["set_null"] = [d.cuCtxSetCurrent(None), current(), d.cuCtxPopCurrent_v2(c.byref(other)), current()]
    out["destroy"] = [d.cuCtxDestroy_v2(created), current(), d.cuCtxDestroy_v2(created) if 0 else None]
    out["destroy_primary"] = d.cuCtxDestroy_v2(handle)
    out["attach"] = [d.cuCtxAttach(c.byref(other), 0), d.cuCtxDetach(other)]
    d.cuCtxSetCurrent(handle)
    out["release"] = [
        d.cuDevicePrimaryCtxRelease_v2(0),
        state(),
        current(),
        d.value("cuCtxGetDevice"),
        d.cuCtxSynchronize(),
        d.cuMemAlloc_v2(c.byref(c.c_void_p()), c.c_size_t(4)),
        d.cuDevicePrimaryCtxRelease_v2(0),
    ]
    again = c.c_void_p(0)
    out["retain_again"] = [
        d.cuDevicePrimaryCtxRetain(c.byref(again), 0),
        again.value == handle.value,
        state(),
        d.cuCtxSynchronize(),
        d.cuCtxGetId(again, c.byref(ident)),
        ident.value,
    ]
    out["reset"] = [
        d.cuDevicePrimaryCtxReset_v2(0),
        state(),
        d.cuCtxSynchronize(),
        d.cuMemAlloc_v2(c.byref(c.c_void_p()), c.c_size_t(4)),
        state(),
    ]
    return out


def visible() -> dict[str, Any]:
    """The device count under values of CUDA_VISIBLE_DEVICES, each in a process of its own."""
    code = (
        "import ctypes as c;d=c.CDLL('libcuda.so.1');n=c.c_int(-1);r=d.cuInit(0);"
        "print(r,d.cuDeviceGetCount(c.byref(n)),n.value)"
    )
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    uuid = listing.split("UUID: ")[1].split(")")[0] if "UUID: " in listing else "GPU-none"
    out = {}
    for key, value in {
        "empty": "",
        "minus": "-1",
        "zero": "0",
        "dup": "0,0",
        "one": "1",
        "zero_one": "0,1",
        "one_zero": "1,0",
        "word": "abc",
        "uuid": uuid,
        "prefix": uuid[:10],
        "prefix4": "GPU-",
        "prefix3": "GPU",
        "upper": uuid.upper(),
        "space": " 0",
        "trail": "0 ",
        "zero_minus": "0,-1,0",
        "plus": "+0",
        "hex": "0x0",
        "zero_word": "0abc",
        "comma": "0,",
        "lead_comma": ",0",
        "none": "none",
        "nodevfiles": "NoDevFiles",
    }.items():
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": value},
        )
        out[key] = [value if "GPU-" not in value else value[:4] + "*", run.stdout.split()]
    return out


def main() -> None:
    if len(sys.argv) > 2:
        symbols = [line for line in open(sys.argv[1]).read().splitlines() if line and not line.startswith("#")]
        part = sys.argv[2]
        d = Driver()
        table: dict[str, Callable[[], Any]] = {
            "errors": lambda: errors(d),
            "before_init": lambda: before_init(d),
            "devices": lambda: devices(d),
            "proc": lambda: (d.cuInit(0), proc_address(d, symbols))[1],
            "proc_edges": lambda: (d.cuInit(0), proc_address_edges(d))[1],
            "contexts": lambda: contexts(d),
            "modules": lambda: modules(d),
            "visible": visible,
        }
        print(json.dumps(table[part]()))
        return
    result = {}
    for part in ("errors", "before_init", "proc", "proc_edges", "devices", "contexts", "modules", "visible"):
        run = subprocess.run([sys.executable, __file__, sys.argv[1], part], capture_output=True, text=True)
        result[part] = (
            json.loads(run.stdout) if run.returncode == 0 else {"failed": run.returncode, "stderr": run.stderr[-2000:]}
        )
        print(part, run.returncode, run.stderr[-500:], file=sys.stderr)
    print(json.dumps(result, separators=(",", ":")))


if __name__ == "__main__":
    main()
