"""Records what a real driver answers, as the reference for the shim's local answers.

Run on a machine with a GPU: ``python record_native.py symbols.txt > native.json``.
Uses ctypes alone, so that it needs nothing but Python and the driver. The
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

PTX = """
.version 7.0
.target sm_75
.address_size 64
.global .align 4 .b8 counter[16];
.const .align 8 .b8 table[64];
.visible .entry plain(.param .u64 p, .param .u32 n, .param .align 16 .b8 s[40])
{ .reg .b64 %rd<2>; .reg .b32 %r<2>; ld.param.u64 %rd1,[p]; ld.param.u32 %r1,[n]; st.global.u32 [%rd1],%r1; ret; }
.visible .entry shared_user(.param .u64 p) .maxntid 256, 1, 1
{ .reg .b64 %rd<3>; .reg .b32 %r<2>; .shared .align 4 .b8 s[12345];
  ld.param.u64 %rd1,[p]; mov.u64 %rd2,s; st.shared.u32 [s],1; bar.sync 0; ld.shared.u32 %r1,[s+4];
  st.global.u32 [%rd1],%r1; ret; }
%s
"""


def _registers_kernel(name: str, count: int) -> str:
    """A kernel that keeps ``count`` values alive, so that it needs about that many registers."""
    loads = "".join(f"ld.global.u32 %r{i},[%rd1+{4 * i}];" for i in range(1, count + 1))
    stores = "".join(f"st.global.u32 [%rd1+{4 * (count - i)}],%r{i};" for i in range(1, count + 1))
    return (f".visible .entry {name}(.param .u64 p) {{ .reg .b64 %rd<2>; .reg .b32 %r<{count + 1}>;"
            f" ld.param.u64 %rd1,[p]; {loads} bar.sync 0; {stores} ret; }}\n")


REGISTERS = {f"regs{n}": n for n in (24, 36, 50, 70, 100, 130, 180, 240)}
SOURCE = PTX.replace("%s", "".join(_registers_kernel(k, n) for k, n in REGISTERS.items())).encode() + b"\0"


class Driver:
    """``driver.cuName(args…)`` gives the CUresult."""

    def __init__(self) -> None:
        self.library = c.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self.library, name)
        function.restype = c.c_int
        return function

    def value(self, name: str, *args: Any, kind: Any = c.c_int) -> Any:
        """``[result, value]`` of a function whose first parameter is the answer."""
        out = kind(0)
        result = getattr(self, name)(c.byref(out), *args)
        return [result, out.value]


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
        for version in (2000, 2010, 2020, 3000, 3010, 3020, 4000, 4010, 5000, 5050, 6000, 6050, 7000, 8000, 9000, 9020,
                        10000, 10010, 10020, 11000, 11010, 11020, 11030, 11040, 11060, 11070, 11080, 12000, 12010,
                        12020, 12030, 12040, 12050, 12060, 12080, 12090, 13000):
            answers = []
            for flags in (0, 1, 2):
                pointer, status = c.c_void_p(0xDEAD), c.c_int(-7)
                result = d.cuGetProcAddress_v2(name.encode(), c.byref(pointer), version, c.c_uint64(flags), c.byref(status))
                answers.append([result, status.value, addresses.get(pointer.value or 0, ["?"]) if pointer.value else None])
            if answers != previous:
                row[str(version)] = answers
                previous = answers
        out[name] = row
    return out


def proc_address_edges(d: Driver) -> dict[str, Any]:
    out = {}
    cases = {"unknown": (b"cuNoSuchThing", 12000, 0), "empty": (b"", 12000, 0), "future": (b"cuInit", 99000, 0),
             "flags4": (b"cuInit", 12000, 4), "flags3": (b"cuInit", 12000, 3), "version0": (b"cuInit", 0, 0),
             "suffixed": (b"cuMemAlloc_v2", 12000, 0), "old": (b"cuMemAllocAsync", 11000, 0)}
    for key, (name, version, flags) in cases.items():
        pointer, status = c.c_void_p(0xDEAD), c.c_int(-7)
        r2 = d.cuGetProcAddress_v2(name, c.byref(pointer), version, c.c_uint64(flags), c.byref(status))
        one = c.c_void_p(0xDEAD)
        r1 = d.cuGetProcAddress(name, c.byref(one), version, c.c_uint64(flags))
        out[key] = {"v2": [r2, status.value, pointer.value == 0xDEAD, bool(pointer.value)],
                    "v1": [r1, one.value == 0xDEAD, bool(one.value)]}
    pointer = c.c_void_p(0)
    out["null_status"] = d.cuGetProcAddress_v2(b"cuNoSuchThing", c.byref(pointer), 12000, c.c_uint64(0), None)
    return out


def before_init(d: Driver) -> dict[str, Any]:
    current = c.c_void_p(1)
    return {"count": d.value("cuDeviceGetCount"), "current": d.cuCtxGetCurrent(c.byref(current)),
            "current_value": current.value, "version": d.value("cuDriverGetVersion"),
            "loading": d.value("cuModuleGetLoadingMode"), "set_current": d.cuCtxSetCurrent(None),
            "init_flags_1": d.cuInit(1), "get_device": d.value("cuCtxGetDevice"), "init": d.cuInit(0)}


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
    trials = {"same": text, "lower": text.lower(), "short": text[5:] if text[4] == ":" else text[-7:], "nofunction": text[:-2],
              "bad": "zz", "absent": "0000:ff:1f.0"}
    out["by_bus"] = {k: [v, d.value("cuDeviceGetByPCIBusId", v.encode())] for k, v in trials.items()}
    out["get"] = {i: d.value("cuDeviceGet", i) for i in (-1, 0, 1, 100)}
    out["bad_device"] = [d.value("cuDeviceGetAttribute", 1, 77), d.value("cuDeviceGetAttribute", 1, -1),
                         d.value("cuDeviceTotalMem_v2", 77, kind=c.c_size_t)]
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
    out["none"] = {"device": d.value("cuCtxGetDevice"), "sync": d.cuCtxSynchronize(), "pop": d.cuCtxPopCurrent_v2(c.byref(other)),
                   "limit": d.value("cuCtxGetLimit", 0, kind=c.c_size_t), "flags": d.value("cuCtxGetFlags"),
                   "priority": d.cuCtxGetStreamPriorityRange(c.byref(c.c_int()), c.byref(c.c_int())),
                   "cache": d.value("cuCtxGetCacheConfig"), "api": d.cuCtxGetApiVersion(None, c.byref(flags)),
                   "id": d.cuCtxGetId(None, c.byref(c.c_uint64())), "destroy_null": d.cuCtxDestroy_v2(None),
                   "push_null": d.cuCtxPushCurrent_v2(None), "alloc": d.cuMemAlloc_v2(c.byref(c.c_void_p()), c.c_size_t(4)),
                   "release": d.cuDevicePrimaryCtxRelease_v2(0), "reset": d.cuDevicePrimaryCtxReset_v2(0)}
    out["set_flags"] = {v: d.cuDevicePrimaryCtxSetFlags_v2(0, v) for v in (0, 1, 4, 8, 3, 5, 16, 32, 64, 128, 256)}
    d.cuDevicePrimaryCtxSetFlags_v2(0, 0)
    out["retain"] = [d.cuDevicePrimaryCtxRetain(c.byref(handle), 0), state(), current()]
    out["set"] = [d.cuCtxSetCurrent(handle), current(), d.value("cuCtxGetDevice")]
    out["set_flags_active"] = [d.cuDevicePrimaryCtxSetFlags_v2(0, 1), state(), d.value("cuCtxGetFlags")]
    out["set_flags_active0"] = [d.cuDevicePrimaryCtxSetFlags_v2(0, 0), state()]
    out["limits"] = {i: d.value("cuCtxGetLimit", i, kind=c.c_size_t) for i in range(-1, 12)}
    out["set_limits"] = {f"{i}={v}": [d.cuCtxSetLimit(i, c.c_size_t(v)), d.value("cuCtxGetLimit", i, kind=c.c_size_t)]
                         for i, v in ((0, 4096), (0, 5000), (0, 1 << 30), (1, 1 << 20), (2, 1 << 24), (3, 2), (4, 100), (5, 32), (6, 0), (9, 1))}
    low, high = c.c_int(9), c.c_int(9)
    out["priority"] = [d.cuCtxGetStreamPriorityRange(c.byref(low), c.byref(high)), low.value, high.value]
    version, ident = c.c_uint(0), c.c_uint64(0)
    out["api"] = [d.cuCtxGetApiVersion(handle, c.byref(version)), version.value, d.cuCtxGetApiVersion(None, c.byref(version))]
    out["id"] = [d.cuCtxGetId(handle, c.byref(ident)), ident.value]
    out["cache"] = [d.value("cuCtxGetCacheConfig"), d.cuCtxSetCacheConfig(1), d.value("cuCtxGetCacheConfig"), d.cuCtxSetCacheConfig(9)]
    out["shared"] = [d.value("cuCtxGetSharedMemConfig"), d.cuCtxSetSharedMemConfig(1), d.cuCtxSetSharedMemConfig(9)]
    out["flags"] = [d.value("cuCtxGetFlags"), d.cuCtxSetFlags(4), d.value("cuCtxGetFlags"), d.cuCtxSetFlags(16), d.value("cuCtxGetFlags"), d.cuCtxSetFlags(0)]
    out["push"] = [d.cuCtxPushCurrent_v2(handle), current(), d.cuCtxPopCurrent_v2(c.byref(other)), other.value == handle.value, current()]
    created = c.c_void_p(0)
    out["create"] = [d.cuCtxCreate_v2(c.byref(created), 0, 0), current(), d.cuCtxGetApiVersion(created, c.byref(version)), version.value,
                     d.cuCtxGetId(created, c.byref(ident)), ident.value, d.value("cuCtxGetFlags")]
    out["create_bad"] = [d.cuCtxCreate_v2(c.byref(c.c_void_p()), 3, 0), d.cuCtxCreate_v2(c.byref(c.c_void_p()), 0, 9), d.cuCtxCreate_v2(None, 0, 0),
                         d.cuCtxCreate_v2(c.byref(c.c_void_p()), 1024, 0)]
    out["set_null"] = [d.cuCtxSetCurrent(None), current(), d.cuCtxPopCurrent_v2(c.byref(other)), current()]
    out["destroy"] = [d.cuCtxDestroy_v2(created), current(), d.cuCtxDestroy_v2(created) if 0 else None]
    out["destroy_primary"] = d.cuCtxDestroy_v2(handle)
    out["attach"] = [d.cuCtxAttach(c.byref(other), 0), d.cuCtxDetach(other)]
    d.cuCtxSetCurrent(handle)
    out["release"] = [d.cuDevicePrimaryCtxRelease_v2(0), state(), current(), d.value("cuCtxGetDevice"), d.cuCtxSynchronize(),
                      d.cuMemAlloc_v2(c.byref(c.c_void_p()), c.c_size_t(4)), d.cuDevicePrimaryCtxRelease_v2(0)]
    again = c.c_void_p(0)
    out["retain_again"] = [d.cuDevicePrimaryCtxRetain(c.byref(again), 0), again.value == handle.value, state(), d.cuCtxSynchronize(),
                           d.cuCtxGetId(again, c.byref(ident)), ident.value]
    out["reset"] = [d.cuDevicePrimaryCtxReset_v2(0), state(), d.cuCtxSynchronize(), d.cuMemAlloc_v2(c.byref(c.c_void_p()), c.c_size_t(4)), state()]
    return out


def modules(d: Driver) -> dict[str, Any]:
    d.cuInit(0)
    out: dict[str, Any] = {}
    handle, module, function = c.c_void_p(0), c.c_void_p(0), c.c_void_p(0)
    out["no_context"] = [d.cuModuleLoadData(c.byref(module), SOURCE), d.cuModuleLoad(c.byref(module), b"/no/such/file")]
    d.cuDevicePrimaryCtxRetain(c.byref(handle), 0)
    d.cuCtxSetCurrent(handle)
    out["bad"] = {"text": d.cuModuleLoadData(c.byref(module), b"hello world\0" * 20), "null": d.cuModuleLoadData(c.byref(module), None),
                  "ptx": d.cuModuleLoadData(c.byref(module), b".version 7.0\n.target sm_75\n.address_size 64\nbogus\n\0"),
                  "newer": d.cuModuleLoadData(c.byref(module), b".version 7.0\n.target sm_999\n.address_size 64\n\0"),
                  "file": d.cuModuleLoad(c.byref(module), b"/no/such/file"), "empty": d.cuModuleLoadData(c.byref(module), b"\0" * 64)}
    out["load"] = d.cuModuleLoadData(c.byref(module), SOURCE)
    count = c.c_uint(0)
    out["count"] = [d.cuModuleGetFunctionCount(c.byref(count), module), count.value]
    out["missing"] = [d.cuModuleGetFunction(c.byref(function), module, b"nope"), d.cuModuleGetFunction(c.byref(function), module, b""),
                      d.cuModuleGetFunction(c.byref(function), module, None)]
    pointer, size = c.c_uint64(0), c.c_size_t(0)
    out["global"] = [d.cuModuleGetGlobal_v2(c.byref(pointer), c.byref(size), module, b"counter"), size.value,
                     d.cuModuleGetGlobal_v2(None, c.byref(size), module, b"table"), size.value,
                     d.cuModuleGetGlobal_v2(None, None, module, b"table"), d.cuModuleGetGlobal_v2(c.byref(pointer), None, module, b"nope"),
                     pointer.value]
    out["tex"] = d.cuModuleGetTexRef(c.byref(c.c_void_p()), module, b"nope")
    kernels = {}
    for name in ("plain", "shared_user", *REGISTERS):
        d.cuModuleGetFunction(c.byref(function), module, name.encode())
        kernels[name] = {"attributes": {i: d.value("cuFuncGetAttribute", i, function) for i in range(-1, 18)},
                         "occupancy": occupancy(d, function)}
    out["kernels"] = kernels
    d.cuModuleGetFunction(c.byref(function), module, b"plain")
    out["params"] = []
    for index in range(0, 5):
        offset, size = c.c_size_t(77), c.c_size_t(77)
        out["params"].append([d.cuFuncGetParamInfo(function, c.c_size_t(index), c.byref(offset), c.byref(size)), offset.value, size.value])
    out["param_null"] = [d.cuFuncGetParamInfo(function, c.c_size_t(0), c.byref(offset), None), d.cuFuncGetParamInfo(function, c.c_size_t(0), None, c.byref(size))]
    text = c.c_char_p()
    out["name"] = [d.cuFuncGetName(c.byref(text), function), (text.value or b"").decode()]
    out["set_attribute"] = {f"{a}={v}": [d.cuFuncSetAttribute(function, a, v), d.value("cuFuncGetAttribute", a, function)] for a, v in (
        (8, 1000), (8, 49152), (8, 100000), (8, 232448), (8, 232449), (8, -1), (9, -1), (9, 50), (9, 101), (9, -2), (0, 5), (4, 1), (10, 1),
        (11, 2), (12, 2), (13, 2), (11, 64), (14, 1), (14, 2), (15, 0), (15, 3), (15, 7), (16, 1))}
    out["cache"] = [d.cuFuncSetCacheConfig(function, 1), d.cuFuncSetCacheConfig(function, 8), d.cuFuncSetSharedMemConfig(function, 1)]
    loaded = c.c_int(-1)
    out["loaded"] = [d.cuFuncIsLoaded(c.byref(loaded), function), loaded.value, d.cuFuncLoad(function)]
    out["libraries"] = libraries(d)
    out["unload"] = d.cuModuleUnload(module)
    out["link"] = links(d)
    return out


def occupancy(d: Driver, function: c.c_void_p) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for block in (1, 31, 32, 33, 64, 96, 128, 160, 192, 224, 256, 288, 352, 384, 416, 480, 512, 576, 640, 672, 736, 768, 896, 1024, 1025, 0):
        for dynamic in (0, 1, 1000, 5000, 20000, 36807, 49152, 49153, 100000, 232448):
            out[f"{block},{dynamic}"] = d.value("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, block, c.c_size_t(dynamic))
    potential: dict[str, Any] = {}
    for limit in (0, 64, 100, 200, 300, 500, 1000, 2000):
        for dynamic in (0, 4096, 30000):
            grid, block = c.c_int(0), c.c_int(0)
            result = d.cuOccupancyMaxPotentialBlockSize(c.byref(grid), c.byref(block), function, None, c.c_size_t(dynamic), limit)
            potential[f"{limit},{dynamic}"] = [result, grid.value, block.value]
    available = {f"{blocks},{block}": d.value("cuOccupancyAvailableDynamicSMemPerBlock", function, blocks, block, kind=c.c_size_t)
                 for blocks in (0, 1, 2, 3, 4, 7, 8, 16, 32, 33) for block in (32, 128, 256, 512, 1024)}
    return {"blocks": out, "potential": potential, "available": available}


def libraries(d: Driver) -> dict[str, Any]:
    library, kernel, module, function = (c.c_void_p(0) for _ in range(4))
    count, context, offset, size = c.c_uint(0), c.c_void_p(0), c.c_size_t(0), c.c_size_t(0)
    pointer, text = c.c_uint64(0), c.c_char_p()
    out: dict[str, Any] = {"load": d.cuLibraryLoadData(c.byref(library), SOURCE, None, None, 0, None, None, 0)}
    out["bad"] = d.cuLibraryLoadData(c.byref(c.c_void_p()), b"hello\0" * 50, None, None, 0, None, None, 0)
    out["count"] = [d.cuLibraryGetKernelCount(c.byref(count), library), count.value]
    out["missing"] = d.cuLibraryGetKernel(c.byref(kernel), library, b"nope")
    out["kernel"] = d.cuLibraryGetKernel(c.byref(kernel), library, b"plain")
    out["name"] = [d.cuKernelGetName(c.byref(text), kernel), (text.value or b"").decode()]
    out["attribute"] = [d.value("cuKernelGetAttribute", i, kernel, 0) for i in range(0, 17)]
    out["param"] = [d.cuKernelGetParamInfo(kernel, c.c_size_t(2), c.byref(offset), c.byref(size)), offset.value, size.value,
                    d.cuKernelGetParamInfo(kernel, c.c_size_t(3), c.byref(offset), c.byref(size))]
    out["function"] = d.cuKernelGetFunction(c.byref(function), kernel)
    out["module"] = d.cuLibraryGetModule(c.byref(module), library)
    out["via_module"] = d.cuModuleGetFunction(c.byref(context), module, b"plain")
    out["same_function"] = context.value == function.value
    out["function_is_kernel"] = function.value == kernel.value
    out["kernel_as_function"] = d.value("cuFuncGetAttribute", 4, kernel)
    out["global"] = [d.cuLibraryGetGlobal(c.byref(pointer), c.byref(size), library, b"counter"), size.value,
                     d.cuLibraryGetGlobal(c.byref(pointer), c.byref(size), library, b"nope"), d.cuLibraryGetGlobal(None, c.byref(size), library, b"table"),
                     d.cuLibraryGetGlobal(None, None, library, b"table")]
    out["managed"] = d.cuLibraryGetManaged(c.byref(pointer), c.byref(size), library, b"counter")
    out["set"] = [d.cuKernelSetAttribute(8, 100000, kernel, 0), d.value("cuKernelGetAttribute", 8, kernel, 0), d.value("cuFuncGetAttribute", 8, function),
                  d.cuKernelSetAttribute(8, 300000, kernel, 0), d.cuKernelSetAttribute(0, 3, kernel, 0), d.cuKernelSetAttribute(8, 1, kernel, 9)]
    out["module_unload"] = d.cuModuleUnload(module)
    out["unload"] = d.cuLibraryUnload(library)
    return out


def links(d: Driver) -> dict[str, Any]:
    state, cubin, size = c.c_void_p(0), c.c_void_p(0), c.c_size_t(0)
    log = c.create_string_buffer(b"\xff" * 512, 512)
    options = (c.c_int * 2)(5, 6)
    values = (c.c_void_p * 2)(c.cast(log, c.c_void_p), 512)
    out: dict[str, Any] = {"create": d.cuLinkCreate_v2(2, options, values, c.byref(state))}
    out["empty"] = d.cuLinkComplete(state, c.byref(cubin), c.byref(size))
    out["destroy"] = d.cuLinkDestroy(state)
    values = (c.c_void_p * 2)(c.cast(log, c.c_void_p), 512)
    d.cuLinkCreate_v2(2, options, values, c.byref(state))
    out["bad"] = [d.cuLinkAddData_v2(state, 1, b"bogus\0", c.c_size_t(6), b"bogus.ptx", 0, None, None), log.value.decode(errors="replace"), values[1]]
    out["file"] = d.cuLinkAddFile_v2(state, 1, b"/no/such", 0, None, None)
    out["good"] = d.cuLinkAddData_v2(state, 1, SOURCE, c.c_size_t(len(SOURCE)), b"good.ptx", 0, None, None)
    out["complete"] = [d.cuLinkComplete(state, c.byref(cubin), c.byref(size)), size.value > 0]
    out["after_complete"] = d.cuLinkAddData_v2(state, 1, SOURCE, c.c_size_t(len(SOURCE)), b"good.ptx", 0, None, None)
    out["destroy2"] = d.cuLinkDestroy(state)
    module = c.c_void_p(0)
    log = c.create_string_buffer(b"\xff" * 512, 512)
    values = (c.c_void_p * 2)(c.cast(log, c.c_void_p), 512)
    text = b".version 7.0\n.target sm_75\n.address_size 64\nbogus\n\0"
    out["jit_log"] = [d.cuModuleLoadDataEx(c.byref(module), text, 2, options, values), log.value.decode(errors="replace"), values[1]]
    return out


def visible() -> dict[str, Any]:
    """The device count under values of CUDA_VISIBLE_DEVICES, each in a process of its own."""
    code = "import ctypes as c;d=c.CDLL('libcuda.so.1');n=c.c_int(-1);r=d.cuInit(0);print(r,d.cuDeviceGetCount(c.byref(n)),n.value)"
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    uuid = listing.split("UUID: ")[1].split(")")[0] if "UUID: " in listing else "GPU-none"
    out = {}
    for key, value in {"empty": "", "minus": "-1", "zero": "0", "dup": "0,0", "one": "1", "zero_one": "0,1", "one_zero": "1,0", "word": "abc",
                       "uuid": uuid, "prefix": uuid[:10], "prefix4": "GPU-", "prefix3": "GPU", "upper": uuid.upper(), "space": " 0", "trail": "0 ", "zero_minus": "0,-1,0",
                       "plus": "+0", "hex": "0x0", "zero_word": "0abc", "comma": "0,", "lead_comma": ",0", "none": "none", "nodevfiles": "NoDevFiles"}.items():
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": value})
        out[key] = [value if "GPU-" not in value else value[:4] + "*", run.stdout.split()]
    return out


def main() -> None:
    if len(sys.argv) > 2:
        symbols = [line for line in open(sys.argv[1]).read().splitlines() if line and not line.startswith("#")]
        part = sys.argv[2]
        d = Driver()
        table: dict[str, Callable[[], Any]] = {
            "errors": lambda: errors(d), "before_init": lambda: before_init(d), "devices": lambda: devices(d),
            "proc": lambda: (d.cuInit(0), proc_address(d, symbols))[1], "proc_edges": lambda: (d.cuInit(0), proc_address_edges(d))[1],
            "contexts": lambda: contexts(d), "modules": lambda: modules(d), "visible": visible}
        print(json.dumps(table[part]()))
        return
    result = {}
    for part in ("errors", "before_init", "proc", "proc_edges", "devices", "contexts", "modules", "visible"):
        run = subprocess.run([sys.executable, __file__, sys.argv[1], part], capture_output=True, text=True)
        result[part] = json.loads(run.stdout) if run.returncode == 0 else {"failed": run.returncode, "stderr": run.stderr[-2000:]}
        print(part, run.returncode, run.stderr[-500:], file=sys.stderr)
    print(json.dumps(result, separators=(",", ":")))


if __name__ == "__main__":
    main()
