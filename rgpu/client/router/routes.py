"""Routes of driver functions: the member of a gang that each concerns, by its parameters, with exceptions listed here.

A handle belongs to one member, an address of device memory too; else the member of the thread's current context is
meant. What is said of devices in general is the same in every copy of the driver library, so the first one answers it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rgpu.session.calls.functions.model import Function

#: Types of parameters that belong to one member, the one that decides first.
HANDLES = ("CUstream", "CUevent", "CUgraphExec", "CUgraph", "CUgraphNode", "CUmodule", "CUfunction", "CUcontext",
           "CUarray", "CUmipmappedArray", "CUmemoryPool", "CUlinkState", "CUuserObject", "CUmemGenericAllocationHandle")

#: Answered by any copy: facts of the list of devices, of the driver, of errors.
ANY = frozenset("""
    cuDeviceCanAccessPeer cuDeviceComputeCapability cuDeviceGet cuDeviceGetAttribute cuDeviceGetByPCIBusId
    cuDeviceGetCount cuDeviceGetLuid cuDeviceGetName cuDeviceGetP2PAttribute cuDeviceGetPCIBusId cuDeviceGetProperties
    cuDeviceGetUuid cuDeviceGetUuid_v2 cuDeviceTotalMem_v2 cuDriverGetVersion cuGetErrorName cuGetErrorString
    cuModuleGetLoadingMode cuMemGetAllocationGranularity cuProfilerStart cuProfilerStop
""".split())

#: Written by hand: contexts, libraries and kernels (which belong to all members), what may concern two members.
BY_HAND = frozenset("""
    cuInit cuGetProcAddress cuGetProcAddress_v2 cuGetExportTable cuThreadExchangeStreamCaptureMode
    cuCtxCreate cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy cuCtxDestroy_v2 cuCtxAttach cuCtxDetach
    cuCtxSetCurrent cuCtxGetCurrent cuCtxPushCurrent cuCtxPushCurrent_v2 cuCtxPopCurrent cuCtxPopCurrent_v2
    cuLibraryLoadData cuLibraryLoadFromFile cuLibraryUnload cuLibraryGetKernel cuLibraryGetKernelCount
    cuLibraryEnumerateKernels cuLibraryGetModule cuLibraryGetGlobal cuLibraryGetManaged
    cuKernelGetAttribute cuKernelSetAttribute cuKernelSetCacheConfig cuKernelGetFunction cuKernelGetLibrary
    cuKernelGetName cuKernelGetParamInfo
    cuLaunchKernelEx cuStreamWaitEvent cuMemCreate cuMemPoolCreate
    cuMemcpy cuMemcpyAsync cuMemcpyPeer cuMemcpyPeerAsync cuMemcpyDtoD_v2 cuMemcpyDtoDAsync_v2 cuMemcpyHtoDAsync_v2
    cuMemcpyDtoHAsync_v2
    cuMemcpy2D_v2 cuMemcpy2DUnaligned_v2 cuMemcpy2DAsync_v2 cuMemcpy3D_v2 cuMemcpy3DAsync_v2 cuMemcpy3DPeer
    cuMemcpy3DPeerAsync
""".split())

#: Functions of memory of the CPU, by its address.
_HOST = frozenset({"cuMemFreeHost", "cuMemHostUnregister", "cuMemHostGetFlags", "cuMemHostGetDevicePointer_v2"})


@dataclass(frozen=True, slots=True)
class Route:
    """How the member is found.

    ``kind``: any, hand, handle, device, address, host or current. ``names``: of the parameters that decide.
    """

    kind: str
    names: tuple[str, ...] = ()


def _split(parameter: str) -> tuple[str, str]:
    """Return (type, name) of a C parameter."""
    name = parameter.replace("*", " ").split()[-1]
    return parameter[:parameter.rindex(name)].strip(), name


def route(function: Function) -> Route:
    """Return the route of an implemented function."""
    if function.symbol in BY_HAND:
        return Route("hand")
    if function.symbol in ANY:
        return Route("any")
    parameters = [_split(parameter) for parameter in function.parameters]
    handles = [name for wanted in HANDLES for kind, name in parameters if kind == wanted]
    if handles:
        return Route("handle", tuple(handles))
    if function.symbol in _HOST:
        return Route("host", tuple(name for kind, name in parameters if kind == "void *"))
    addresses = [name for kind, name in parameters if kind == "CUdeviceptr"]
    if addresses and function.symbol != "cuMemAddressReserve":
        return Route("address", (addresses[0],))
    if function.symbol == "cuMemRetainAllocationHandle":
        return Route("address", ("reinterpret_cast<CUdeviceptr>(addr)",))
    devices = [name for kind, name in parameters if kind == "CUdevice"]
    return Route("device", (devices[0],)) if devices else Route("current")


def kernels(function: Function) -> tuple[str, ...]:
    """Return the parameters that may be a kernel of a library, which each member knows by another handle."""
    return tuple(name for kind, name in map(_split, function.parameters) if kind == "CUfunction")
