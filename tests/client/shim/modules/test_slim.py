"""What of a fat binary is sent: never less than what the driver would take."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.shim.fatbins import ELF, FORCE_PTX, ONLY_PTX, PTX, Part, Slimmer, pack, unpack

H200 = (9, 0)
DEVICES = [(7, 5), (8, 0), (8, 6), (8, 9), H200, (10, 0), (10, 3), (12, 0), (12, 1)]
ARCHITECTURES = [major * 10 + minor for major, minor in DEVICES]
FULL = [Part(ELF, a) for a in (75, 80, 86, 90, 100, 120)] + [Part(PTX, 120)]


@pytest.fixture(scope="module")
def slimmer(tmp_path_factory: pytest.TempPathFactory) -> Slimmer:
    return Slimmer(tmp_path_factory.mktemp("slim"))


def names(data: bytes) -> list[str]:
    return [f"{'ptx' if part.kind == PTX else 'sm' if part.kind == ELF else part.kind}{part.architecture}{part.variant}"
            for part in unpack(data)]


def taken(parts: list[Part], capability: tuple[int, int], families: bool, flags: int = 0) -> list[Part]:
    """The driver's choice, as the CUDA programming guide has it; several where the guide does not decide.

    ``families``: whether code for a family (sm_100f) runs on this later member of it.
    """
    device = capability[0] * 10 + capability[1]

    def runs(part: Part) -> bool:
        if part.architecture == device:
            return True
        return part.architecture < device and (part.variant == "" or part.variant == "f" and families)

    codes = [p for p in parts if p.kind == ELF and p.architecture // 10 == capability[0] and runs(p)]
    texts = [p for p in parts if p.kind == PTX and runs(p)]
    for candidates in ([texts] if flags & ONLY_PTX else [texts, codes] if flags & FORCE_PTX else [codes, texts]):
        if candidates:
            best = max(p.architecture for p in candidates)
            return [p for p in candidates if p.architecture == best]
    return []


def test_the_exact_machine_code_is_enough(slimmer: Slimmer) -> None:
    assert names(slimmer.slim(pack(FULL), H200)) == ["sm90"]


@pytest.mark.parametrize(("parts", "capability", "flags", "kept"), [
    (FULL, (8, 9), 0, ["sm86"]),
    (FULL, (12, 1), 0, ["sm120"]),
    (FULL, (12, 0), FORCE_PTX, ["sm120", "ptx120"]),
    ([*FULL, Part(PTX, 75), Part(PTX, 80)], (7, 5), ONLY_PTX, ["ptx75"]),
    ([Part(ELF, 90), Part(ELF, 90, "a"), Part(ELF, 80), Part(PTX, 90)], H200, 0, ["sm90", "sm90a"]),
    ([Part(ELF, 90, "a"), Part(PTX, 80)], H200, 0, ["sm90a"]),
    ([Part(ELF, 80), Part(PTX, 75), Part(PTX, 80)], H200, 0, ["ptx80"]),
    ([Part(ELF, 100, "a"), Part(PTX, 90), Part(ELF, 80)], (10, 3), 0, ["sm100a", "ptx90"]),  # the code may not run
    ([Part(ELF, 100, "f"), Part(ELF, 100), Part(ELF, 103, "a"), Part(ELF, 90)], (10, 3), 0, ["sm103a"]),
    ([Part(PTX, 90, "a"), Part(PTX, 80), Part(PTX, 75)], (10, 0), 0, ["ptx90a", "ptx80"]),
    ([Part(8, 90), Part(ELF, 90), Part(ELF, 80), Part(64, 80)], H200, 0, ["890", "sm90", "6480"]),  # unknown kinds
])
def test_what_is_kept(slimmer: Slimmer, parts: list[Part], capability: tuple[int, int], flags: int,
                      kept: list[str]) -> None:
    assert names(slimmer.slim(pack(parts), capability, flags)) == kept


@pytest.mark.parametrize("parts", [
    [Part(ELF, 100), Part(ELF, 120)],  # nothing runs: the server says so
    [Part(PTX, 100), Part(ELF, 80)], [Part(ELF, 90)], [],
])
def test_what_is_left_alone(slimmer: Slimmer, parts: list[Part]) -> None:
    assert slimmer.slim(pack(parts), H200) == pack(parts)


def test_other_binaries_stay(slimmer: Slimmer) -> None:
    text = b".version 8.0\n.target sm_75\n"
    assert slimmer.slim(text, H200) == text
    assert names(slimmer.slim(pack(FULL, header_size=32), H200)) == ["sm90"]


def test_a_damaged_entry_keeps_all(slimmer: Slimmer) -> None:
    """Where an entry leaves the module binary nothing is known of those behind it."""
    data = bytearray(pack(FULL))
    data[16 + 64 + 24 + 8] = 0xFF  # the size of the second entry
    data[16 + 64 + 24 + 9] = 0xFF
    assert slimmer.slim(bytes(data), H200) == bytes(data)


part = st.builds(Part, st.sampled_from([PTX, ELF, ELF, ELF, 8, 64]), st.sampled_from(ARCHITECTURES),
                 st.sampled_from(["", "", "", "a", "f"]), st.binary(max_size=40))


@settings(max_examples=400, deadline=None)
@given(st.lists(part, max_size=9), st.sampled_from(DEVICES), st.sampled_from([0, 0, ONLY_PTX, FORCE_PTX]))
def test_the_driver_takes_the_same(slimmer: Slimmer, parts: list[Part], capability: tuple[int, int],
                                   flags: int) -> None:
    whole = unpack(pack(parts))
    made = slimmer.slim(pack(parts), capability, flags)
    kept = unpack(made)
    for families in (False, True):
        assert taken(kept, capability, families, flags) == taken(whole, capability, families, flags)
    assert [p for p in whole if p in kept] == kept  # in their order, unchanged
    assert slimmer.slim(made, capability, flags) == made


def test_real_code(slimmer: Slimmer, tmp_path: Path) -> None:
    """Cubins and PTX of NVRTC in one fat binary: the one for the device is left, byte for byte."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    source = b'extern "C" __global__ void k(float *p) { p[threadIdx.x] *= 2; }'
    parts = []
    for architecture in (75, 80, 90):
        _, program = nvrtc.nvrtcCreateProgram(source, b"k.cu", 0, [], [])
        assert nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=sm_%d" % architecture])[0] == 0
        cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        nvrtc.nvrtcGetCUBIN(program, cubin)
        text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
        nvrtc.nvrtcGetPTX(program, text)
        parts += [Part(ELF, architecture, "", cubin), Part(PTX, architecture, "", text)]
    (left,) = unpack(slimmer.slim(pack(parts), H200))
    assert left.payload.rstrip(b"\0") == parts[4].payload.rstrip(b"\0") and left.payload[:4] == b"\x7fELF"
    (left,) = unpack(slimmer.slim(pack(parts), (7, 5), ONLY_PTX))
    assert b".target sm_75" in left.payload


def test_what_fatbinary_writes(slimmer: Slimmer, tmp_path: Path) -> None:
    """The toolkit's own tool, where it is installed: variants are told apart by its flags."""
    tools = "/usr/local/cuda/bin:/usr/bin"
    fatbinary, ptxas = shutil.which("fatbinary", path=tools), shutil.which("ptxas", path=tools)
    if fatbinary is None or ptxas is None:
        pytest.skip("fatbinary and ptxas of a CUDA toolkit are needed")
    command = [fatbinary, f"--create={tmp_path}/all.fatbin", "-64"]
    for name in ("80", "90", "90a", "100", "100a", "100f"):
        text = f".version 8.8\n.target sm_{name}\n.address_size 64\n.visible .entry k() {{ ret; }}\n"
        (tmp_path / f"{name}.ptx").write_text(text)
        subprocess.run([ptxas, f"-arch=sm_{name}", f"{tmp_path}/{name}.ptx", "-o", f"{tmp_path}/{name}.cubin"],
                       check=True)
        command.append(f"--image3=kind=elf,sm={name},file={tmp_path}/{name}.cubin")
    subprocess.run([*command, f"--image3=kind=ptx,sm=90a,file={tmp_path}/90a.ptx"], check=True)
    whole = (tmp_path / "all.fatbin").read_bytes()
    assert names(slimmer.slim(whole, H200)) == ["sm90", "sm90a"]
    assert names(slimmer.slim(whole, (10, 0))) == ["sm100", "sm100a", "sm100f"]
    assert names(slimmer.slim(whole, (10, 3))) == ["sm100", "sm100a", "sm100f"]
    assert names(slimmer.slim(whole, (8, 9))) == ["sm80"]
