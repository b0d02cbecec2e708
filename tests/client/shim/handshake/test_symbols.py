"""What the library exports: every name of libcuda, and nothing else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from rgpu.session.calls.functions import symbols
from tests.client.shim.handshake.conftest import Stage


def test_exports(library: Path) -> None:
    text = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1].split("@")[0] for line in text.splitlines()}
    assert exported == set(symbols())
    assert all(name.startswith("cu") for name in exported)


def test_needs_nothing_but_libc_and_libstdcxx(library: Path) -> None:
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line}
    allowed = {"libc.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libdl.so.2",
               "librt.so.1", "ld-linux-x86-64.so.2"}
    assert needed <= allowed
    assert "Library soname: [libcuda.so.1]" in text


def test_dlsym_of_every_name(stage: Stage) -> None:
    """cuBLASLt looks names up by dlsym; a missing one becomes its status 14."""
    code = """
import ctypes, json, sys
driver = ctypes.CDLL("libcuda.so.1")
names = json.loads(sys.argv[1])
print(json.dumps([name for name in names if not ctypes.cast(getattr(driver, name, None), ctypes.c_void_p).value]))
"""
    assert json.loads(stage.run(code, json.dumps(symbols())).out) == []


def test_unimplemented_is_said_once_by_name(stage: Stage) -> None:
    code = ("import ctypes; d = ctypes.CDLL('libcuda.so.1'); "
            "print(d.cuArrayGetPlane(0, 0, 0), d.cuArrayGetPlane(0, 0, 0))")
    outcome = stage.run(code)
    assert outcome.out.split() == ["801", "801"]
    assert outcome.err.count("cuArrayGetPlane") == 1
