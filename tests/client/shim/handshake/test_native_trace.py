"""The shim against a recording of driver 580 on an H200: the same questions, the same answers.

``record_native.py`` asks; ``native_580.json`` holds what the driver answered.
The peer pretends to be that H200. What differs on purpose stands in
``ON_PURPOSE`` with its reason; anything else that differs is a mistake.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.session import addresses, facts
from rgpu.session.objects import module_table
from tests.client.shim.handshake.conftest import Stage
from tests.support.shim.peer import MIB, NATIVE

HERE = Path(__file__).parent
SYMBOLS = HERE.parents[3] / "rgpu" / "session" / "calls" / "symbols.txt"
ATTRIBUTES = {int(key): row[1] for key, row in NATIVE["devices"]["attributes"].items() if row[0] == 0}

#: path in the recording → why the shim answers otherwise
ON_PURPOSE: dict[str, str] = {
    **{f"devices/attributes/{n}/1": "the shim does not implement it, so it is not claimed" for n in (
        89, 103, 107, 112, 114, 116, 117, 119, 121, 124, 125, 128, 129, 142, 144)},
    "devices/attributes/91/1": "registered memory has another address on the device (cuMemHostGetDevicePointer)",
    **{f"devices/affinity/{n}/0": "execution affinity is not implemented" for n in (0, 1)},
    "modules/bad/newer": "what a target is too new for is the worker's answer, and the peer has none",
    "modules/tex": "texture references are not implemented",
    "modules/link/jit_log/1": "words of the peer", "modules/link/jit_log/2": "words of the peer",
}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value


def _recorded_load(payload: bytes) -> tuple[int, bytes, bytes]:
    """The table of record_native's own module, with the attributes that the H200 gave its kernels."""
    if b"bogus" in payload:
        return 218, b"", b"ptxas fatal   : Ptx assembly aborted due to errors"
    if b"shared_user" not in payload:
        return 0, module_table.encode(module_table.ModuleTable((), ())), b""
    functions = []
    for name, kernel in NATIVE["modules"]["kernels"].items():
        parameters = ((0, 8), (8, 4), (16, 40)) if name == "plain" else ((0, 8),)
        attributes = tuple(kernel["attributes"][str(i)][1] for i in range(16))
        functions.append(module_table.FunctionInfo(name, parameters, attributes))
    base = addresses.DEVICE_BASE + addresses.GLOBALS_OFFSET
    variables = (module_table.GlobalVariable("counter", base, 16), module_table.GlobalVariable("table", base + 256, 64))
    return 0, module_table.encode(module_table.ModuleTable(tuple(functions), variables)), b""


@pytest.fixture
def h200(make_stage: Callable[..., Stage]) -> Stage:
    uuid = bytes(range(0xA0, 0xB0))
    info = facts.DeviceInfo("NVIDIA H200", uuid, 143771 * MIB, (0, 0, 6), attributes=ATTRIBUTES)
    stage = make_stage(devices=(info,), quota=64 << 30)
    stage.peer.loads = [_recorded_load] * 20
    return stage


def _ask(stage: Stage, part: str, **environ: str) -> Any:
    code = "import sys, runpy; sys.path.insert(0, sys.argv[1]); sys.argv[:2] = ['record']; " \
           "runpy.run_path(sys.path[0] + '/record_native.py', run_name='__main__')"
    return json.loads(stage.run(code, HERE, SYMBOLS, part, **environ).out)


def _compare(part: str, answered: Any) -> None:
    ours, native = dict(_leaves(answered, part)), dict(_leaves(NATIVE[part], part))
    wrong = {path: f"driver {native.get(path)!r}, shim {ours.get(path)!r}" for path in native.keys() | ours.keys()
             if path not in ON_PURPOSE and native.get(path) != ours.get(path)}
    assert not wrong, "\n".join(f"{path}: {text}" for path, text in sorted(wrong.items())[:40])
    needless = [path for path in ON_PURPOSE if path.startswith(part + "/") and ours[path] == native[path]]
    assert not needless, f"these do not differ: {needless}"


@pytest.mark.parametrize("part", ["errors", "before_init", "proc", "proc_edges", "devices", "contexts", "modules"])
def test_answers_are_the_drivers(h200: Stage, part: str) -> None:
    _compare(part, _ask(h200, part))


def test_visible_devices_are_the_drivers(h200: Stage) -> None:
    code = "import ctypes as c;d=c.CDLL('libcuda.so.1');n=c.c_int(-1);r=d.cuInit(0);" \
           "print(r,d.cuDeviceGetCount(c.byref(n)),n.value)"
    text = "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
    stands_for = {"uuid": text, "prefix": text[:10], "prefix4": "GPU-", "upper": text.upper()}
    for key, (value, expected) in NATIVE["visible"].items():
        value = stands_for[key] if "*" in value else value
        assert h200.run(code, CUDA_VISIBLE_DEVICES=value).out.split() == expected, (key, value)
