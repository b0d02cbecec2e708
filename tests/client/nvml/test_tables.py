"""Names, generated files, and structures as nvidia-ml-py lays them out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rgpu.client.nvml import generate
from rgpu.client.nvml.functions import NO_PERMISSION, NOT_SUPPORTED, PROTOTYPES, refused, symbols

SOURCES = Path(generate.__file__).parent

#: ours → nvidia-ml-py's class
STRUCTURES = {
    "nvmlPciInfo_v2_t": "nvmlPciInfo_v2_t", "nvmlPciInfo_t": "nvmlPciInfo_t", "nvmlPciInfoExt_t": "nvmlPciInfoExt_v1_t",
    "nvmlUUID_t": "c_nvmlUUID_t", "nvmlMemory_t": "c_nvmlMemory_t", "nvmlMemory_v2_t": "c_nvmlMemory_v2_t",
    "nvmlProcessInfo_v2_t": "c_nvmlProcessInfo_v2_t", "nvmlProcessDetail_t": "c_nvmlProcessDetail_v1_t",
    "nvmlProcessDetailList_t": "c_nvmlProcessDetailList_v1_t", "nvmlFieldValue_t": "c_nvmlFieldValue_t"}
#: fields that are called otherwise here
RENAMED = {"nvmlUUID_t.value": "text", **{f"nvmlPciInfo_v2_t.reserved{i}": f"reserved[{i}]" for i in range(4)}}
VERSIONS = {"nvmlPciInfoExt_v1": ("nvmlPciInfoExt_t", 1), "nvmlUUID_v1": ("nvmlUUID_t", 1),
            "nvmlMemory_v2": ("nvmlMemory_v2_t", 2), "nvmlProcessDetailList_v1": ("nvmlProcessDetailList_t", 1)}


def test_generated_files_are_current() -> None:
    assert generate.stale() == []


def test_what_is_written_by_hand_is_exported_and_defined() -> None:
    names = symbols()
    assert names == sorted(set(names)) and set(PROTOTYPES) <= set(names)
    text = "".join(path.read_text() for path in SOURCES.glob("*.cpp"))
    for name in PROTOTYPES:
        assert re.search(rf"\b{name}\([^;]*\) {{", text), name


def test_what_only_root_may_do_is_not_permitted() -> None:
    assert refused("nvmlDeviceSetPowerManagementLimit") == refused("nvmlDeviceResetGpuLockedClocks") == NO_PERMISSION
    assert refused("nvmlDeviceGetPowerUsage") == refused("nvmlDeviceSetCpuAffinity") == NOT_SUPPORTED


def test_every_name_that_nvidia_ml_py_looks_up() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is in the test extra")
    wanted = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(pynvml.__file__).read_text()))
    assert len(wanted) > 300 and sorted(wanted - set(symbols())) == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_layouts(tmp_path: Path) -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is in the test extra")
    lines, wanted = [], []
    for ours, theirs in STRUCTURES.items():
        structure = getattr(pynvml, theirs)
        lines.append(f'std::printf("{ours} %zu\\n", sizeof({ours}));')
        wanted.append(f"{ours} {pynvml.sizeof(structure)}")
        for name, *_ in structure._fields_:
            lines.append(f'std::printf("{ours}.{name} %zu\\n", offsetof({ours}, '
                         f"{RENAMED.get(f'{ours}.{name}', name)}));")
            wanted.append(f"{ours}.{name} {getattr(structure, name).offset}")
    for constant, (ours, version) in VERSIONS.items():
        lines.append(f'std::printf("{constant} %u\\n", nvml_version<{ours}>({version}));')
        wanted.append(f"{constant} {getattr(pynvml, constant)}")
    (tmp_path / "t.cpp").write_text('#include <cstddef>\n#include <cstdio>\n#include "types.hpp"\nint main() {\n'
                                    + "\n".join(lines) + "\n}\n")
    program = tmp_path / "t"
    subprocess.run(["g++", "-std=c++20", f"-I{SOURCES}", str(tmp_path / "t.cpp"), "-o", program], check=True)
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines() == wanted


def test_only_nvml_names_and_no_foreign_library(library: Path) -> None:
    text = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1].split("@")[0] for line in text.splitlines()} == set(symbols())
    text = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    assert "Library soname: [libnvidia-ml.so.1]" in text
    needed = set(re.findall(r"Shared library: \[([^\]]+)\]", text))
    assert needed <= {"libc.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "ld-linux-x86-64.so.2"}
