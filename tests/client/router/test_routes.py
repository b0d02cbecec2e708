"""The routes of driver functions, and what is generated from them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rgpu.client.router import generate
from rgpu.client.router.routes import ANY, BY_HAND, Route, kernels, route
from rgpu.session import generated
from rgpu.session.calls.functions import FUNCTIONS, symbols
from tests.support.building import libraries

IMPLEMENTED = {name: entry for name, entry in FUNCTIONS.items() if entry.implemented}


def test_generated_files_follow_from_the_table() -> None:
    assert generated.stale(generate.OUTPUTS, generated.root()) == []
    assert not ANY & BY_HAND and ANY | BY_HAND <= {entry.symbol for entry in IMPLEMENTED.values()}


@pytest.mark.parametrize(("name", "found"), [
    ("cuDeviceGetName", Route("any")), ("cuStreamWaitEvent", Route("hand")), ("cuMemAlloc_v2", Route("current")),
    ("cuLaunchKernel", Route("handle", ("hStream", "f"))), ("cuEventQuery", Route("handle", ("hEvent",))),
    ("cuMemFreeAsync", Route("handle", ("hStream",))), ("cuMemFree_v2", Route("address", ("dptr",))),
    ("cuDevicePrimaryCtxRetain", Route("device", ("dev",))), ("cuMemFreeHost", Route("host", ("p",))),
    ("cuGraphAddKernelNode_v2", Route("handle", ("hGraph",))), ("cuMemAddressReserve", Route("current")),
])
def test_routes(name: str, found: Route) -> None:
    (entry,) = [entry for entry in IMPLEMENTED.values() if entry.symbol == name]
    assert route(entry) == found


def test_every_function_of_one_device_or_object_is_routed_by_it() -> None:
    """A function that has such a parameter and is sent to the current context would be wrong for another member's."""
    for entry in IMPLEMENTED.values():
        types = [parameter.rpartition(" ")[0] for parameter in entry.parameters if "*" not in parameter]
        if route(entry).kind == "current" and entry.symbol != "cuMemAddressReserve":
            assert not [one for one in types if one in ("CUdevice", "CUdeviceptr") or one.startswith("CU")
                        and one.endswith(("stream", "event", "context", "module", "graph", "function"))], entry.symbol
    assert {"cuLaunchKernel", "cuFuncGetAttribute"} <= {one.symbol for one in IMPLEMENTED.values() if kernels(one)}


def test_it_exports_the_drivers_names() -> None:
    library = libraries() / "router" / "libcuda.so.1"
    lines = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True,
                           check=True).stdout.splitlines()
    assert {line.split()[-1] for line in lines} == {*symbols(), "rgpu_router_facts"}


#: In a process of its own: the library keeps the addresses of sessions for itself.
WITHOUT_AN_AGENT = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1] + "/router/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
version, pointer = ctypes.c_int(), ctypes.c_void_p()
assert cuda.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= 12000
assert cuda.cuGetProcAddress_v2(b"cuMemAlloc", ctypes.byref(pointer), 13000, ctypes.c_uint64(0), None) == 0
assert pointer.value == ctypes.cast(cuda.cuMemAlloc_v2, ctypes.c_void_p).value, "the routing library's own function"
assert cuda.cuCtxGetCurrent(ctypes.byref(pointer)) == 3 and cuda.cuCtxSynchronize() == 3
assert cuda.cuStreamQuery(ctypes.c_void_p(4096)) == 3, "a wild pointer is never followed"
assert cuda.cuInit(0) == 100
print("as it should be")
"""


def test_without_an_agent_there_is_an_error_and_no_crash() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_AN_AGENT, str(libraries())], capture_output=True, text=True)
    assert done.stdout == "as it should be\n", (done.stdout, done.stderr)
