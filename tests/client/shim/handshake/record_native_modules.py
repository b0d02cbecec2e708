"""The part of ``record_native.py`` that asks about modules, functions, occupancy, libraries and links."""

from __future__ import annotations

import ctypes as c
from typing import Any

from native_driver import Driver  # beside this file, wherever it was copied to

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
    return (
        f".visible .entry {name}(.param .u64 p) {{ .reg .b64 %rd<2>; .reg .b32 %r<{count + 1}>;"
        f" ld.param.u64 %rd1,[p]; {loads} bar.sync 0; {stores} ret; }}\n"
    )


REGISTERS = {f"regs{n}": n for n in (24, 36, 50, 70, 100, 130, 180, 240)}
SOURCE = PTX.replace("%s", "".join(_registers_kernel(k, n) for k, n in REGISTERS.items())).encode() + b"\0"


def modules(d: Driver) -> dict[str, Any]:
    d.cuInit(0)
    out: dict[str, Any] = {}
    handle, module, function = c.c_void_p(0), c.c_void_p(0), c.c_void_p(0)
    out["no_context"] = [d.cuModuleLoadData(c.byref(module), SOURCE), d.cuModuleLoad(c.byref(module), b"/no/such/file")]
    d.cuDevicePrimaryCtxRetain(c.byref(handle), 0)
    d.cuCtxSetCurrent(handle)
    out["bad"] = {
        "text": d.cuModuleLoadData(c.byref(module), b"hello world\0" * 20),
        "null": d.cuModuleLoadData(c.byref(module), None),
        "ptx": d.cuModuleLoadData(c.byref(module), b".version 7.0\n.target sm_75\n.address_size 64\nbogus\n\0"),
        "newer": d.cuModuleLoadData(c.byref(module), b".version 7.0\n.target sm_999\n.address_size 64\n\0"),
        "file": d.cuModuleLoad(c.byref(module), b"/no/such/file"),
        "empty": d.cuModuleLoadData(c.byref(module), b"\0" * 64),
    }
    out["load"] = d.cuModuleLoadData(c.byref(module), SOURCE)
    count = c.c_uint(0)
    out["count"] = [d.cuModuleGetFunctionCount(c.byref(count), module), count.value]
    out["missing"] = [
        d.cuModuleGetFunction(c.byref(function), module, b"nope"),
        d.cuModuleGetFunction(c.byref(function), module, b""),
        d.cuModuleGetFunction(c.byref(function), module, None),
    ]
    pointer, size = c.c_uint64(0), c.c_size_t(0)
    out["global"] = [
        d.cuModuleGetGlobal_v2(c.byref(pointer), c.byref(size), module, b"counter"),
        size.value,
        d.cuModuleGetGlobal_v2(None, c.byref(size), module, b"table"),
        size.value,
        d.cuModuleGetGlobal_v2(None, None, module, b"table"),
        d.cuModuleGetGlobal_v2(c.byref(pointer), None, module, b"nope"),
        pointer.value,
    ]
    out["tex"] = d.cuModuleGetTexRef(c.byref(c.c_void_p()), module, b"nope")
    kernels = {}
    for name in ("plain", "shared_user", *REGISTERS):
        d.cuModuleGetFunction(c.byref(function), module, name.encode())
        kernels[name] = {
            "attributes": {i: d.value("cuFuncGetAttribute", i, function) for i in range(-1, 18)},
            "occupancy": occupancy(d, function),
        }
    out["kernels"] = kernels
    d.cuModuleGetFunction(c.byref(function), module, b"plain")
    out["params"] = []
    for index in range(0, 5):
        offset, size = c.c_size_t(77), c.c_size_t(77)
        out["params"].append(
            [
                d.cuFuncGetParamInfo(function, c.c_size_t(index), c.byref(offset), c.byref(size)),
                offset.value,
                size.value,
            ]
        )
    out["param_null"] = [
        d.cuFuncGetParamInfo(function, c.c_size_t(0), c.byref(offset), None),
        d.cuFuncGetParamInfo(function, c.c_size_t(0), None, c.byref(size)),
    ]
    text = c.c_char_p()
    out["name"] = [d.cuFuncGetName(c.byref(text), function), (text.value or b"").decode()]
    out["set_attribute"] = {
        f"{a}={v}": [d.cuFuncSetAttribute(function, a, v), d.value("cuFuncGetAttribute", a, function)]
        for a, v in (
            (8, 1000),
            (8, 49152),
            (8, 100000),
            (8, 232448),
            (8, 232449),
            (8, -1),
            (9, -1),
            (9, 50),
            (9, 101),
            (9, -2),
            (0, 5),
            (4, 1),
            (10, 1),
            (11, 2),
            (12, 2),
            (13, 2),
            (11, 64),
            (14, 1),
            (14, 2),
            (15, 0),
            (15, 3),
            (15, 7),
            (16, 1),
        )
    }
    out["cache"] = [
        d.cuFuncSetCacheConfig(function, 1),
        d.cuFuncSetCacheConfig(function, 8),
        d.cuFuncSetSharedMemConfig(function, 1),
    ]
    loaded = c.c_int(-1)
    out["loaded"] = [d.cuFuncIsLoaded(c.byref(loaded), function), loaded.value, d.cuFuncLoad(function)]
    out["libraries"] = libraries(d)
    out["unload"] = d.cuModuleUnload(module)
    out["link"] = links(d)
    return out


# fmt: off
BLOCK_SIZES = (1, 31, 32, 33, 64, 96, 128, 160, 192, 224, 256, 288, 352, 384, 416, 480, 512, 576, 640, 672, 736, 768,
               896, 1024, 1025, 0)
# fmt: on


def occupancy(d: Driver, function: c.c_void_p) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for block in BLOCK_SIZES:
        for dynamic in (0, 1, 1000, 5000, 20000, 36807, 49152, 49153, 100000, 232448):
            out[f"{block},{dynamic}"] = d.value(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor", function, block, c.c_size_t(dynamic)
            )
    potential: dict[str, Any] = {}
    for limit in (0, 64, 100, 200, 300, 500, 1000, 2000):
        for dynamic in (0, 4096, 30000):
            grid, best = c.c_int(0), c.c_int(0)
            result = d.cuOccupancyMaxPotentialBlockSize(
                c.byref(grid), c.byref(best), function, None, c.c_size_t(dynamic), limit
            )
            potential[f"{limit},{dynamic}"] = [result, grid.value, best.value]
    available = {
        f"{blocks},{block}": d.value(
            "cuOccupancyAvailableDynamicSMemPerBlock", function, blocks, block, kind=c.c_size_t
        )
        for blocks in (0, 1, 2, 3, 4, 7, 8, 16, 32, 33)
        for block in (32, 128, 256, 512, 1024)
    }
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
    out["param"] = [
        d.cuKernelGetParamInfo(kernel, c.c_size_t(2), c.byref(offset), c.byref(size)),
        offset.value,
        size.value,
        d.cuKernelGetParamInfo(kernel, c.c_size_t(3), c.byref(offset), c.byref(size)),
    ]
    out["function"] = d.cuKernelGetFunction(c.byref(function), kernel)
    out["module"] = d.cuLibraryGetModule(c.byref(module), library)
    out["via_module"] = d.cuModuleGetFunction(c.byref(context), module, b"plain")
    out["same_function"] = context.value == function.value
    out["function_is_kernel"] = function.value == kernel.value
    out["kernel_as_function"] = d.value("cuFuncGetAttribute", 4, kernel)
    out["global"] = [
        d.cuLibraryGetGlobal(c.byref(pointer), c.byref(size), library, b"counter"),
        size.value,
        d.cuLibraryGetGlobal(c.byref(pointer), c.byref(size), library, b"nope"),
        d.cuLibraryGetGlobal(None, c.byref(size), library, b"table"),
        d.cuLibraryGetGlobal(None, None, library, b"table"),
    ]
    out["managed"] = d.cuLibraryGetManaged(c.byref(pointer), c.byref(size), library, b"counter")
    out["set"] = [
        d.cuKernelSetAttribute(8, 100000, kernel, 0),
        d.value("cuKernelGetAttribute", 8, kernel, 0),
        d.value("cuFuncGetAttribute", 8, function),
        d.cuKernelSetAttribute(8, 300000, kernel, 0),
        d.cuKernelSetAttribute(0, 3, kernel, 0),
        d.cuKernelSetAttribute(8, 1, kernel, 9),
    ]
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
    out["bad"] = [
        d.cuLinkAddData_v2(state, 1, b"bogus\0", c.c_size_t(6), b"bogus.ptx", 0, None, None),
        log.value.decode(errors="replace"),
        values[1],
    ]
    out["file"] = d.cuLinkAddFile_v2(state, 1, b"/no/such", 0, None, None)
    out["good"] = d.cuLinkAddData_v2(state, 1, SOURCE, c.c_size_t(len(SOURCE)), b"good.ptx", 0, None, None)
    out["complete"] = [d.cuLinkComplete(state, c.byref(cubin), c.byref(size)), size.value > 0]
    out["after_complete"] = d.cuLinkAddData_v2(state, 1, SOURCE, c.c_size_t(len(SOURCE)), b"good.ptx", 0, None, None)
    out["destroy2"] = d.cuLinkDestroy(state)
    module = c.c_void_p(0)
    log = c.create_string_buffer(b"\xff" * 512, 512)
    values = (c.c_void_p * 2)(c.cast(log, c.c_void_p), 512)
    text = b".version 7.0\n.target sm_75\n.address_size 64\nbogus\n\0"
    out["jit_log"] = [
        d.cuModuleLoadDataEx(c.byref(module), text, 2, options, values),
        log.value.decode(errors="replace"),
        values[1],
    ]
    return out
