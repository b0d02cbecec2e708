"""libnvidia-ml.so.1 through nvidia-ml-py, against an agent that answers as the test says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rgpu.client.nvml.functions import PROTOTYPES, refused, symbols
from rgpu.session.errors import Corrupt, RgpuError
from rgpu.session.observed import Observation, Process
from tests.client.nvml.conftest import GIB, Answering, observation, run

FACTS = """
import json
n.nvmlInit()
told = {"count": n.nvmlDeviceGetCount(), "driver": n.nvmlSystemGetDriverVersion(),
        "cuda": n.nvmlSystemGetCudaDriverVersion(), "nvml": n.nvmlSystemGetNVMLVersion(), "devices": []}
for i in range(told["count"]):
    h = n.nvmlDeviceGetHandleByIndex(i)
    pci, memory = n.nvmlDeviceGetPciInfo(h), n.nvmlDeviceGetMemoryInfo(h)
    second = n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
    again = [n.nvmlDeviceGetIndex(x) for x in (
        n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h)), n.nvmlDeviceGetHandleByPciBusId(pci.busId),
        n.nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy.lower()))]
    told["devices"].append({
        "name": n.nvmlDeviceGetName(h), "uuid": n.nvmlDeviceGetUUID(h), "bus": [pci.busId, pci.busIdLegacy],
        "capability": n.nvmlDeviceGetCudaComputeCapability(h), "cores": n.nvmlDeviceGetNumGpuCores(h),
        "architecture": n.nvmlDeviceGetArchitecture(h), "width": n.nvmlDeviceGetMemoryBusWidth(h),
        "memory": [memory.total, memory.free, memory.used],
        "v2": [second.total, second.free, second.used, second.reserved],
        "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
        "others": [n.nvmlDeviceGetGraphicsRunningProcesses(h), n.nvmlDeviceGetMPSComputeRunningProcesses(h)],
        "again": again})
print(json.dumps(told))
"""


def test_a_session_of_two_devices(library: Path, agent: Answering) -> None:
    agent.reply = observation(2, used=3 << 20)
    told = json.loads(run(library, agent, FACTS))
    assert (told["count"], told["driver"], told["cuda"]) == (2, "580.65.06", 13000)
    assert told["nvml"] == "13.580.65.06"
    second = told["devices"][1]
    free = GIB - (3 << 20)
    assert second == {
        "name": "NVIDIA H200", "uuid": "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f",
        "bus": ["00000000:1C:00.0", "0000:1C:00.0"], "capability": [9, 0], "cores": 132 * 128, "architecture": 9,
        "width": 6144, "memory": [GIB, free, 3 << 20], "v2": [GIB, free, 3 << 20, 0],
        "processes": [[os.getpid(), 3 << 20]], "others": [[], []], "again": [1, 1, 1]}


def test_before_a_session_nothing_is_used(library: Path, agent: Answering) -> None:
    agent.reply = observation(live=False, release="")
    told = json.loads(run(library, agent, FACTS))
    assert told["driver"] == "580.00"  # nobody knows it: the branch that the library is modelled on
    assert told["devices"][0]["memory"] == [GIB, GIB, 0] and told["devices"][0]["processes"] == []


def test_no_place_in_the_pool_is_no_device(library: Path, agent: Answering) -> None:
    agent.reply = 100
    assert json.loads(run(library, agent, FACTS.replace('n.nvmlSystemGetCudaDriverVersion()', "0")))["count"] == 0


@pytest.mark.parametrize("how", ["none", "gone", "unready"])
def test_without_an_agent_there_is_no_driver(library: Path, agent: Answering, how: str) -> None:
    agent.reply = 802
    if how == "gone":
        agent.close()
    code = "\ntry: n.nvmlInit()\nexcept n.NVMLError as error: print(error.value)"
    assert run(library, None if how == "none" else agent, code).strip() == "9"


def test_an_agent_that_goes_is_a_lost_gpu(library: Path, agent: Answering) -> None:
    told = run(library, agent, """
n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)
os.unlink(os.environ["RGPU_AGENT"])
import time; time.sleep(0.05)
print(n.nvmlDeviceGetName(h))
for ask in (n.nvmlDeviceGetMemoryInfo, n.nvmlDeviceGetComputeRunningProcesses):
    try: ask(h)
    except n.NVMLError as error: print(error.value)
""")
    assert told.split("\n")[:3] == ["NVIDIA H200", "15", "15"]


def test_memory_is_never_an_old_answer(library: Path, agent: Answering) -> None:
    code = "n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n[n.nvmlDeviceGetMemoryInfo(h) for _ in range(5)]"
    run(library, agent, code)
    assert agent.asked >= 6


def test_every_other_name_refuses_cleanly(library: Path, agent: Answering) -> None:
    """Called with no argument at all: UNINITIALIZED before nvmlInit, the table's answer after it."""
    wanted = {"NVML_ERROR_NOT_SUPPORTED": 3, "NVML_ERROR_NO_PERMISSION": 4}
    names = {name: wanted[refused(name)] for name in symbols() if name not in PROTOTYPES}
    code = (f"import ctypes\nl = ctypes.CDLL({str(library)!r})\nnames = {names!r}\n"
            "assert {getattr(l, name)() for name in names} == {1}\nassert l.nvmlInit_v2() == 0\n"
            "print([name for name, result in names.items() if getattr(l, name)() != result])\n"
            "assert l.nvmlShutdown() == 0 and l.nvmlShutdown() == 1")
    assert run(library, agent, code).strip() == "[]"


def test_bad_arguments(library: Path, agent: Answering) -> None:
    assert run(library, agent, """
import ctypes
l = ctypes.CDLL("libnvidia-ml.so.1"); p = ctypes.c_void_p(); count = ctypes.c_uint(0)
assert l.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 1
assert l.nvmlInit_v2() == 0
assert l.nvmlDeviceGetHandleByIndex_v2(1, ctypes.byref(p)) == 2
assert l.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(p)) == 0
assert l.nvmlDeviceGetHandleByIndex_v2(0, None) == 2 and l.nvmlDeviceGetCount_v2(None) == 2
assert l.nvmlDeviceGetName(ctypes.c_void_p(64), ctypes.create_string_buffer(96), 96) == 2
assert l.nvmlDeviceGetName(p, None, 96) == 2 and l.nvmlDeviceGetName(p, ctypes.create_string_buffer(96), 11) == 7
assert l.nvmlDeviceGetName(p, ctypes.create_string_buffer(96), 12) == 0
assert l.nvmlDeviceGetMemoryInfo_v2(p, ctypes.create_string_buffer(40)) == 25
assert l.nvmlDeviceGetHandleByUUID(b"GPU-nope", ctypes.byref(p)) == 6
assert l.nvmlDeviceGetHandleByPciBusId_v2(b"what", ctypes.byref(p)) == 2
assert l.nvmlDeviceGetHandleByPciBusId_v2(b"0:77:0.0", ctypes.byref(p)) == 6
count.value = 0
assert l.nvmlDeviceGetComputeRunningProcesses_v3(p, ctypes.byref(count), None) == 7 and count.value == 1
l.nvmlErrorString.restype = ctypes.c_char_p
assert l.nvmlErrorString(3) == b"Not Supported" and l.nvmlErrorString(-5) == l.nvmlErrorString(999) == b"Unknown Error"
for which, status in ((0, 0), (1, 0), (2, 5)):
    assert l.nvmlDeviceGetP2PStatus(p, p, which, ctypes.byref(count)) == 0 and count.value == status
uuid = n.c_nvmlUUID_t(); uuid.type = 2
ctypes.memmove(ctypes.addressof(uuid) + 8, bytes(range(16)), 16)
assert l.nvmlDeviceGetHandleByUUIDV(ctypes.byref(uuid), ctypes.byref(p)) == 0
print("ok")
""").strip() == "ok"


def test_a_hostile_answer_is_an_error(library: Path, agent: Answering) -> None:
    """Cut anywhere, or longer than it says: nvmlInit fails, and nothing is read past the end."""
    whole = observation(2).encode()
    bad = [whole[:at] for at in range(len(whole))] + [whole + b"\0"]
    assert len(bad) > 100
    agent.reply = list(bad)
    told = run(library, agent, f"import ctypes\nl = ctypes.CDLL({str(library)!r})\n"
                               f"print([l.nvmlInit_v2() for _ in range({len(bad)})])")
    assert json.loads(told) == [999] * len(bad)


def test_the_blob_survives_its_way() -> None:
    for one in (observation(), observation(3, live=False), observation(0)):
        assert Observation.decode(one.encode()) == one


def test_the_blob_refuses_what_it_is_not() -> None:
    whole = observation(2).encode()
    for at in range(len(whole)):
        with pytest.raises(RgpuError):
            Observation.decode(whole[:at])
    with pytest.raises(Corrupt):
        Observation.decode(whole + b"\0")
    beyond = Observation(observation().facts, True, "", (0,), (Process(1, 1, 0),)).encode()
    with pytest.raises(Corrupt, match="devices"):
        Observation.decode(beyond)
