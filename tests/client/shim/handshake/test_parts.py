"""The shim's pure parts against RFC vectors, a recording of a real driver, and hostile input."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
SHIM = HERE.parents[3] / "rgpu" / "client" / "shim"
ROOMS = [f"-I{room}" for room in SHIM.iterdir()]
NATIVE: dict[str, Any] = json.loads((HERE / "native_580.json").read_text())
ATTRIBUTE = {int(k): v[1] for k, v in NATIVE["devices"]["attributes"].items()}


class Parts:
    """The compiled driver program: ``ask`` sends one request line and returns the answer's line."""

    def __init__(self, program: Path) -> None:
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the program died at {words!r:.200}: {self.process.poll()}"
        return line.rstrip("\n")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    program = tmp_path_factory.mktemp("parts") / "parts"
    sources = [HERE / "parts.cpp", SHIM / "handshake" / "handshake_md2.cpp", SHIM / "modules" / "fatbin.cpp"]
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", *ROOMS]
    subprocess.run(["g++", *flags, *sources, "-o", program], check=True)
    running = Parts(program)
    yield running
    running.close()


@pytest.mark.parametrize(("text", "digest"), [  # RFC 1319, A.5
    ("", "8350e5a3e24c153df2275c9f80692773"), ("a", "32ec01ec4a6dac72c0ab96fb34c0b5d1"),
    ("abc", "da853b0d3f88d99b30283a69e6ded6bb"), ("message digest", "ab4f496bfb2a530b219ff33031fe06b0"),
    ("abcdefghijklmnopqrstuvwxyz", "4e8ddff3650292ab5a4108c3aa47940b"),
    ("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", "da33def2a42df13975352846c30338cd"),
    ("1234567890" * 8, "d5976f79d83d3a0dc9806c3c66f3efd8")])
def test_md2_of_the_rfc(parts: Parts, text: str, digest: str) -> None:
    assert parts.ask("md2", text.encode().hex() or "-") == digest


def test_hmac_vector_of_the_handshake(parts: Parts) -> None:
    message = bytes((7 * i + 3) % 256 for i in range(76))
    assert parts.ask("hmac", "146ADDAE53A9A752AA0841360BF55A9F", message.hex()) == "ec265ba396aa5f31104fd9913d5ffa6e"


def test_hmac_folds_a_long_key(parts: Parts) -> None:
    key = bytes(range(40))
    folded = parts.ask("md2", key.hex())
    assert parts.ask("hmac", key.hex(), "00ff") == parts.ask("hmac", folded, "00ff")


def test_self_test_message_and_fixed_answers(parts: Parts) -> None:
    uuid = bytes(range(16))
    arguments = (13000, 13002, 4711, 99, 1 << 40, 2 << 40, 3 << 40, 1_800_000_000)
    message, low, high = parts.ask("self", *arguments, uuid.hex(), 0, 6, 1, uuid.hex(), -1, 7, 0).split()
    devices = uuid + struct.pack("<3i", 0, 6, 1) + uuid + struct.pack("<3i", -1, 7, 0)
    assert bytes.fromhex(message) == struct.pack("<4I4Q", *arguments) + devices
    signed = parts.ask("hmac", "146ADDAE53A9A752AA0841360BF55A9F", message)
    assert struct.pack("<2Q", int(low), int(high)).hex() == signed
    for version, first in ((13000, 0x3341181C03CB675C), (13001, 0x1841181C03CB675C)):
        answer = parts.ask("self", 13000, version, 1, 1, 1, 1, 1, 1).split()
        assert [int(word) for word in answer[1:]] == [first, 0x8ED383AA1F4CD1E8]


UUID = {0: "00112233445566778899aabbccddeeff", 1: "00112233aaaaaaaaaaaaaaaaaaaaaaaa"}


def test_visible_devices_as_recorded(parts: Parts) -> None:
    """One device, every value of the recording; a UUID stands as ``GPU-*`` there."""
    for key, (value, (init, _, count)) in NATIVE["visible"].items():
        if "*" in value:
            text = "GPU-00112233-4455-6677-8899-aabbccddeeff"
            value = {"uuid": text, "prefix": text[:10], "prefix4": "GPU-", "upper": text.upper()}[key]
        answer = parts.ask("visible", f"{UUID[0]};{value}").split()
        code = 101 if answer[0] == "repeated" else 0 if answer[1:] else 100
        assert (code, len(answer) - 1 if code == 0 else -1) == (int(init), int(count)), key


@pytest.mark.parametrize(("value", "answer"), [
    (None, "ok 0 1"), ("1,0", "ok 1 0"), ("1", "ok 1"), ("1,2,0", "ok 1"), ("GPU-00112233", "ok"),
    ("GPU-00112233-a", "ok 1"), ("GPU-00112233-4,GPU-00112233-a", "ok 0 1"), ("0,GPU-00112233-4", "repeated 0")])
def test_visible_of_two(parts: Parts, value: str | None, answer: str) -> None:
    request = f"{UUID[0]} {UUID[1]}" + ("" if value is None else f";{value}")
    assert parts.ask("visible", request) == answer


def _occupancy(parts: Parts, kernel: dict[str, Any], what: str, block: int, dynamic: int, limit: int) -> list[int]:
    device = [ATTRIBUTE[i] for i in (1, 39, 106, 82, 81, 111, 16, 10, 75)]
    function = [kernel["attributes"][str(i)][1] for i in (0, 1, 8, 4)]
    return [int(word) for word in parts.ask("occupancy", *device, *function, what, block, dynamic, limit).split()]


def test_occupancy_is_the_drivers(parts: Parts) -> None:
    cases = 0
    for name, kernel in NATIVE["modules"]["kernels"].items():
        recorded = kernel["occupancy"]
        for key, (result, value) in recorded["blocks"].items():
            block, dynamic = map(int, key.split(","))
            if block == 0:
                assert result == 1
                continue
            assert _occupancy(parts, kernel, "blocks", block, dynamic, 0) == [value], (name, key)
            cases += 1
        for key, native in recorded["potential"].items():
            limit, dynamic = map(int, key.split(","))
            assert [0, *_occupancy(parts, kernel, "potential", 0, dynamic, limit)] == native, (name, key)
        for key, (result, value) in recorded["available"].items():
            blocks, block = map(int, key.split(","))
            assert _occupancy(parts, kernel, "available", block, 0, blocks) == [-1 if result else value], (name, key)
    assert cases == 10 * 25 * 10


def _entry(kind: int, architecture: int, payload: bytes) -> bytes:
    return struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 0, 0, architecture) + bytes(32) + payload


def _fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_fat_binary(parts: Parts) -> None:
    data = _fatbin(_entry(2, 75, b"x" * 24), _entry(1, 80, b"y" * 8))
    assert parts.ask("image", data.hex()) == f"0 0 {len(data)} 2:75:24 1:80:8 | 11"
    newer = _fatbin(_entry(2, 80, b"x" * 24), _entry(1, 90, b"y" * 8))
    assert parts.ask("image", newer.hex()).endswith("| 01")


def test_binaries_that_are_none(parts: Parts) -> None:
    header = struct.Struct("<IHHQ")
    for data in (b"hello world\0", bytes(64), b"\0", b"\xff\xfe\0\0", header.pack(0xBA55ED50, 1, 15, 0),
                 header.pack(0xBA55ED50, 1, 16, 1 << 63), header.pack(0xBA55ED50, 1, 16, (1 << 64) - 4),
                 struct.pack("<IIQQ", 0x466243B1, 1, 0, 0), b"\x7fELF\x01" + bytes(60)):
        assert parts.ask("image", data.hex()) == "2", data


def test_text_ends_at_its_nul(parts: Parts) -> None:
    text = b"// made by hand\n.version 7.0\n.target sm_75\n"
    assert parts.ask("image", (text + b"\0").hex()) == f"0 2 {len(text)} | 11"
    assert parts.ask("image", b"a\0".hex()) == "2"


def test_a_real_cubin_ends_where_its_file_ends(parts: Parts) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    source = b'__device__ int g[7]; extern "C" __global__ void k(int *p) { p[threadIdx.x] = g[p[0]]; }'
    _, program = nvrtc.nvrtcCreateProgram(source, b"k.cu", 0, [], [])
    assert nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=sm_75"])[0] == 0
    size = nvrtc.nvrtcGetCUBINSize(program)[1]
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    assert parts.ask("image", cubin.hex()).split()[:3] == ["0", "1", str(size)]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([0, 1, 2, 3]))
def test_hostile_entries_are_not_followed(parts: Parts, noise: bytes, cut: int) -> None:
    """The module binary stands in front of an unreadable page: reading past its stated size would end the process."""
    good = _entry(2, 75, b"x" * 16)
    for body in (good[:len(good) - cut] + noise, noise, good + noise):
        data = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
        assert parts.ask("image", data.hex()).startswith(f"0 0 {len(data)}")
