"""What leaves the client of a fat binary, and when: the first use, the useful entries, the program's own wishes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rgpu.session.facts import ONLY_PTX
from rgpu.session.objects.module_table import FunctionInfo, ModuleTable, encode
from tests.client.shim.handshake.conftest import Stage
from tests.support.shim import peer
from tests.support.shim.fatbins import unpack
from tests.support.shim.peer import START

FATBIN = r"""
def entry(kind, architecture, text=b"code" * 8):
    text += bytes(-len(text) % 8)
    return struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(text), 0, 0, 0, 0, architecture, 0, 0, 0x11, 0, 0) + text
entries = entry(2, 75) + entry(2, 80) + entry(1, 75, PTX) + entry(1, 70, PTX)
fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
"""
TABLE = encode(ModuleTable((FunctionInfo("one", (), (1024, *[0] * 15)),), ()))
LOAD = 'ok("cuCtxSetCurrent", new("cuDevicePrimaryCtxRetain", 0)); new("cuModuleLoadData", fatbin)'


def run(stage: Stage, code: str, **environ: str) -> list[list[str]]:
    """The entries of each module binary that arrived."""
    stage.peer.loads += [lambda payload: (0, TABLE, b"")] * 4
    stage.run(START + FATBIN + code, **environ)
    payloads = [payload for name, _, payload in stage.peer.calls if name == "module_load"]
    return [[f"{'ptx' if part.kind == 1 else 'sm'}{part.architecture}" for part in unpack(payload)]
            for payload in payloads]


def test_only_the_device_s_own_code_is_sent(stage: Stage) -> None:
    assert run(stage, LOAD) == [["sm75"]]


@pytest.mark.parametrize("variable", ["CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT"])
def test_ptx_goes_where_it_shall_be_compiled(stage: Stage, variable: str) -> None:
    assert run(stage, LOAD, **{variable: "1"}) == [["sm75", "ptx75"]]


def test_not_where_that_is_switched_off(stage: Stage) -> None:
    assert run(stage, LOAD, CUDA_FORCE_PTX_JIT="0") == [["sm75"]]


def test_a_device_that_executes_ptx_gets_ptx(make_stage: Callable[..., Stage]) -> None:
    plain = peer.device()
    stage = make_stage(devices=(replace(plain, attributes=plain.attributes | {ONLY_PTX: 1}),))
    assert run(stage, LOAD + f'\nassert d.cuDeviceGetAttribute(c.byref(c.c_int()), {ONLY_PTX}, 0) == 1') == [["ptx75"]]


@pytest.mark.parametrize(("option", "value"), [(9, 75), (10, 0)])  # CU_JIT_TARGET, CU_JIT_FALLBACK_STRATEGY
def test_all_goes_where_an_option_chooses(stage: Stage, option: int, value: int) -> None:
    load = LOAD.replace('new("cuModuleLoadData", fatbin)', 'new("cuModuleLoadDataEx", fatbin, 1, '
                        f'(c.c_int * 1)({option}), (c.c_void_p * 1)({value}))')
    assert run(stage, load) == [["sm75", "sm80", "ptx75", "ptx70"]]


LIBRARY = r"""
ok("cuCtxSetCurrent", new("cuDevicePrimaryCtxRetain", 0))
library = new("cuLibraryLoadData", fatbin, None, None, 0, None, None, 0)
"""


def test_a_library_goes_when_a_kernel_is_needed(stage: Stage) -> None:
    assert run(stage, LIBRARY) == []
    assert run(stage, LIBRARY + 'new("cuLibraryGetKernel", library, b"one")') == [["sm75"]]


def test_a_library_goes_at_once_with_eager_loading(stage: Stage) -> None:
    assert run(stage, LIBRARY, CUDA_MODULE_LOADING="EAGER") == [["sm75"]]
