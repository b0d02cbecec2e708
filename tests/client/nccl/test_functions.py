"""The table of NCCL's functions, and what is generated from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rgpu.client.nccl import generate
from rgpu.client.nccl.functions import PROTOTYPES, TEXTS, symbols
from rgpu.client.run.launcher import COLLECTIVES, environment, loadable
from tests.support.building import libraries


def test_generated_files_follow_from_the_table() -> None:
    assert generate.stale() == []
    assert set(PROTOTYPES) <= set(symbols()) and TEXTS <= set(PROTOTYPES)
    assert symbols() == sorted(symbols())


def test_every_name_is_exported_twice() -> None:
    library = libraries() / "nccl" / COLLECTIVES
    found = {name for name in subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True,
                                             check=True).stdout.split() if "nccl" in name}
    assert found == {prefix + name for name in symbols() for prefix in ("", "p")}


#: In a process of its own: our driver library keeps the session's addresses for itself.
WRONG_CALLS = """
import ctypes, sys
ctypes.CDLL(sys.argv[1] + "/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
nccl = ctypes.CDLL(sys.argv[1] + "/nccl/libnccl.so.2")
nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = ctypes.c_char_p
assert nccl.ncclGroupEnd() == 5 and b"without ncclGroupStart" in nccl.ncclGetLastError(None)
assert nccl.ncclCommCount(ctypes.c_void_p(4096), None) == 4, "a wild pointer is never followed"
assert nccl.ncclAllReduce(None, None, ctypes.c_size_t(1), 7, 0, None, None) == 4
assert nccl.ncclGetErrorString(0) == b"no error" and nccl.ncclGetErrorString(99) == b"unknown result code"
print("as it should be")
"""


def test_without_an_agent_there_is_an_error_and_no_crash() -> None:
    done = subprocess.run([sys.executable, "-c", WRONG_CALLS, str(libraries())], capture_output=True, text=True)
    assert done.stdout == "as it should be\n", done.stderr


#: A library that opens another by its plain name, which only its own RUNPATH leads to.
OPENER = """
#include <dlfcn.h>
extern "C" void *open_it() { return dlopen("libonly_here.so", RTLD_NOW); }
"""
BY_PATH = """
import ctypes, sys
folder = sys.argv[1]
ours = ctypes.CDLL("libnccl.so.2")._handle
for name in ("libnccl.so", "libnccl.so.2", "libnccl.so.2.28.9"):
    assert ctypes.CDLL(f"{folder}/{name}")._handle == ours, name
    assert hasattr(ctypes.CDLL(f"{folder}/{name}"), "ncclGetVersion")
assert ctypes.CDLL(f"{folder}/libnccl-net.so")._handle != ours
try:
    ctypes.CDLL(f"{folder}/nowhere/libnccl.so.2")
except OSError as error:
    assert "nowhere" in str(error)
else:
    raise SystemExit("what is not there was opened")
opener = ctypes.CDLL(f"{folder}/libopener.so")
opener.open_it.restype = ctypes.c_void_p
assert opener.open_it(), "the loader does not see who asks"
print("as it should be")
"""


def test_a_program_that_opens_it_by_a_path_gets_ours(tmp_path: Path) -> None:
    def build(name: str, text: str, *options: str) -> None:
        subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", tmp_path / name, *options], input=text,
                       text=True, check=True)

    for name in ("libnccl.so", "libnccl.so.2", "libnccl.so.2.28.9", "libnccl-net.so"):
        build(name, "extern \"C\" int nothing() { return 0; }")
    (tmp_path / "inner").mkdir()
    build("inner/libonly_here.so", "extern \"C\" int nothing() { return 0; }")
    build("libopener.so", OPENER, "-Wl,-rpath,$ORIGIN/inner", "-Wl,--enable-new-dtags", "-ldl")
    library = loadable(libraries(), tmp_path)
    done = subprocess.run([sys.executable, "-c", BY_PATH, tmp_path], capture_output=True, text=True, env={
        "PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(library),
        "LD_PRELOAD": f"{library}/libcuda.so.1:{library}/nccl/{COLLECTIVES}"})
    assert done.stdout == "as it should be\n", done.stderr


def test_it_is_put_in_front_only_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "nccl").mkdir()
    (tmp_path / "nccl" / COLLECTIVES).touch()
    agent = Path("/run/a.sock")
    assert COLLECTIVES not in environment({}, tmp_path, agent)["LD_PRELOAD"]
    preload = environment({"RGPU_NCCL": "calls", "LD_PRELOAD": "mine.so"}, tmp_path, agent)["LD_PRELOAD"]
    assert preload.split(":") == [f"{tmp_path}/libcuda.so.1", f"{tmp_path}/nccl/{COLLECTIVES}", "mine.so"]
