"""Modules of the cpu device: what is accepted, tables, globals, launches, linking."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import lz4.block
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.checkpoint.device import Launch
from rgpu.server.device.cpu import CpuDevice, fatbin, ptxlink
from rgpu.server.device.cpu.facts import device_uuid
from rgpu.session.addresses import DEVICE_BASE, GLOBALS_OFFSET, PAGE
from rgpu.session.errors import DeviceError
from tests.server.device.cpu_device.conftest import WAIT, Client
from tests.support.cpu import stub

GLOBALS = DEVICE_BASE + GLOBALS_OFFSET


def refused(result: int, call: object, *arguments: object) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        call(*arguments)  # type: ignore[operator]
    assert caught.value.result == result, caught.value
    return caught.value


def entry(kind: int, target: int, payload: bytes, codec: str = "") -> bytes:
    flags, packed, raw = 0x11, payload, 0
    if codec == "lz4":
        flags, packed, raw = flags | 0x2000, lz4.block.compress(payload, store_size=False), len(payload)
    elif codec == "zstd":
        flags, packed, raw = flags | 0x8000, zstandard.ZstdCompressor().compress(payload), len(payload)
    body = packed + bytes(-len(packed) % 8)
    head = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(body), len(packed) if codec else 0, 0, 0, 8, target,
                       0, 0, flags, 0, raw)
    assert len(head) == 64
    return head + body


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


# -- module binaries ---------------------------------------------------------------------------
@pytest.mark.parametrize("codec", ["", "lz4", "zstd"])
def test_fat_binaries_in_every_compression(device: CpuDevice, codec: str) -> None:
    binary = fat(entry(2, 80, b"\x7fELF cubin"), entry(1, 90, stub.text("global wrong 4 4"), codec),
                entry(1, 75, stub.text("global right 4 4"), codec), entry(1, 52, stub.text("global old 4 4"), codec))
    table, _ = device.load(1, binary, b"", False)
    assert [variable.name for variable in table.globals] == ["right"]
    assert [function.name for function in table.functions] == list(stub.KERNELS)


@pytest.mark.parametrize("binary", [
    fat(entry(2, 75, b"\x7fELF")), fat(entry(1, 80, stub.text())), fat(), b"\x7fELF\2\1\1" + bytes(60)])
def test_machine_code_alone_is_no_binary_for_this_device(device: CpuDevice, binary: bytes) -> None:
    error = refused(209, device.load, 1, binary, b"", False)
    assert "sm_75" in error.message or "compute_75" in error.message


@pytest.mark.parametrize("binary", [b"", b"nonsense", bytes(64), fat()[:10], struct.pack("<I", 0x466243B1) + bytes(20)])
def test_what_is_no_binary(device: CpuDevice, binary: bytes) -> None:
    refused(200, device.load, 1, binary, b"", False)


def test_ptx_errors_carry_their_line(device: CpuDevice) -> None:
    error = refused(218, device.load, 1, stub.text("bad"), b"", False)
    assert error.message == f"line {stub.text('bad').decode().count(chr(10)) + 1}: unsupported instruction 'bad'"
    refused(222, device.load, 1, stub.text().replace(b".version 8.0", b".version 99.0"), b"", False)
    device.load(1, stub.text(), b"", False)  # a failed load leaves the handle free
    refused(400, device.load, 1, stub.text(), b"", False)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_fat_binaries_never_do_more_than_fail(data: st.DataObject) -> None:
    binary = bytearray(fat(entry(2, 75, b"\x7fELF cubin"), entry(1, 75, stub.text(), data.draw(
        st.sampled_from(["", "lz4", "zstd"])))))
    for _ in range(data.draw(st.integers(1, 3))):
        binary[data.draw(st.integers(0, 159))] = data.draw(st.integers(0, 255))
    binary = binary[:data.draw(st.integers(0, len(binary)))]
    try:
        fatbin.extract_ptx(bytes(binary), 75)
    except DeviceError as error:
        assert error.result in (200, 209, 218)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_lying_size_allocates_nothing(codec: str) -> None:
    binary = bytearray(fat(entry(1, 75, bytes(1 << 20), codec)))
    struct.pack_into("<Q", binary, 16 + 56, 1 << 40)
    refused(200, fatbin.extract_ptx, bytes(binary), 75)
    struct.pack_into("<Q", binary, 16 + 56, 100)
    refused(200, fatbin.extract_ptx, bytes(binary), 75)


def test_a_frame_that_says_another_size_than_its_entry() -> None:
    text = bytes(1 << 20)
    longer, silent = zstandard.compress(text + b"1"), zstandard.ZstdCompressor(write_content_size=False).compress(text)
    flags, size = fatbin.FLAG_ZSTD, len(text)
    assert fatbin.decompress(fatbin.Entry(1, 75, flags, silent, size)) == text
    refused(200, fatbin.decompress, fatbin.Entry(1, 75, flags, silent, size - 1))
    refused(200, fatbin.decompress, fatbin.Entry(1, 75, flags, longer, size))
    terabyte = longer[:4] + bytes([0xE0]) + (1 << 40).to_bytes(8, "little") + longer[9:]  # its header's content size
    assert zstandard.frame_content_size(terabyte) == 1 << 40
    refused(200, fatbin.decompress, fatbin.Entry(1, 75, flags, terabyte, size))
    refused(200, fatbin.decompress, fatbin.Entry(1, 75, flags, longer[:len(longer) // 2], size + 1))


def test_a_fat_binary_of_nvidias_own() -> None:
    """libcudadevrt.a of CUDA 13: machine code for many targets and PTX for the newest, zstd-compressed."""
    spec = importlib.util.find_spec("nvidia")
    found = [path for root in (spec.submodule_search_locations if spec else []) or []
             for path in Path(root).glob("**/libcudadevrt.a")]
    if not found:
        pytest.skip("nvidia-cuda-runtime is not installed")
    data = found[0].read_bytes()
    start = fatbin.find_embedded(data)
    assert start is not None
    entries = fatbin.entries(data, start)
    assert {e.kind for e in entries} == {fatbin.KIND_PTX, fatbin.KIND_ELF}
    for e in entries:
        code = fatbin.decompress(e)
        assert code[:4] == b"\x7fELF" if e.kind == fatbin.KIND_ELF else b".version" in code
    refused(209, fatbin.embedded_ptx, data, 75)
    newest = max(e.target for e in entries if e.kind == fatbin.KIND_PTX)
    assert ".func" in fatbin.embedded_ptx(data, newest)[0]


# -- tables and globals ------------------------------------------------------------------
def test_the_table(device: CpuDevice) -> None:
    table, _ = device.load(1, stub.text("kernel big static_shared=1024 max_threads=256 local_bytes=8 num_regs=40"),
                           b"", False)
    info = table.functions[-1]
    assert (info.name, info.parameters) == ("big", ((0, 8), (8, 8)))
    assert info.attributes == (256, 1024, 0, 8, 40, 75, 75, 0, 48 * 1024 - 1024, -1, 0, 0, 0, 0, 0, 0)
    refused(218, device.load, 2, stub.text("kernel huge static_shared=60000"), b"", False)


def test_globals_are_placed_alike_after_the_same_history(device: CpuDevice) -> None:
    history = [("global a 4 4 abcd", "const b 70000 1024"), ("global c 1 1",), (), ("global d 8 8", "global e 8 8")]

    def replay(target: CpuDevice) -> list[tuple[str, int, int]]:
        found = []
        for handle, lines in enumerate(history, 1):
            table, _ = target.load(handle, stub.text(*lines), b"", False)
            found += [(v.name, v.address, v.size) for v in table.globals]
            if handle == 2:
                target.unload(1)
        return found

    first = replay(device)
    assert first == [("a", GLOBALS, 4), ("b", GLOBALS + 1024, 70000), ("c", GLOBALS + 2 * PAGE, 1),
                     ("d", GLOBALS + 3 * PAGE, 8), ("e", GLOBALS + 3 * PAGE + 256, 8)]
    device.close()
    second = CpuDevice(0, 64 << 20, 2, engine=stub)  # type: ignore[arg-type]
    try:
        assert replay(second) == first
        kept = [(r.name, r.owner) for r in second.regions() if r.kind == "global"]
        assert kept == [("c", 2), ("d", 4), ("e", 4)]
    finally:
        second.close()


def test_globals_are_initialised_copied_and_released(client: Client) -> None:
    table, _ = client.device.load(1, stub.text("global g 8 4 abcd"), b"", False)
    address = table.globals[0].address
    assert client.read(address, 8) == b"abcd\0\0\0\0"
    client.write(address + 4, b"wxyz")
    assert client.device.drain(WAIT)
    assert client.device.read(address, 8) == b"abcdwxyz"
    refused(1, client.device.copy_out, 90, 0, address + 8, 1, 1, 1, print)
    client.device.unload(1)
    refused(1, client.device.copy_out, 91, 0, address, 1, 1, 1, print)
    refused(400, client.device.unload, 1)


def test_the_last_context_takes_everything_with_it(client: Client) -> None:
    device = client.device
    device.create_context(40, 0, False)
    device.create_stream(41, 40, 0, 0)
    device.create_event(42, 40, 0)
    device.destroy_context(40)
    refused(400, device.destroy_stream, 41)
    refused(400, device.destroy_event, 42)
    assert client.read(client.base, 1) == b"\0"
    device.destroy_context(16)
    refused(201, device.destroy_context, 16)
    refused(400, device.unload, 17)
    refused(1, device.free, client.base)
    device.unmap(client.base, 2 << 20)


# -- launches --------------------------------------------------------------------------------
@pytest.mark.parametrize("options, result", [
    ({"grid": (0, 1, 1)}, 1), ({"grid": (1, 65536, 1)}, 1), ({"grid": (2**31, 1, 1)}, 1), ({"block": (1, 1, 65)}, 1),
    ({"block": (0, 1, 1)}, 1), ({"block": (1025, 1, 1)}, 1), ({"block": (64, 32, 1)}, 1),
    ({"shared": 48 * 1024 + 1}, 1),
    ({"cooperative": True, "grid": (257, 1, 1)}, 720), ({"stream": 99}, 400), ({"attributes": b"x"}, 1),
    ({"attributes": struct.pack("<II3I", 4, 0, 2, 1, 1) + bytes(52)}, 1), ({"attributes": b"\7" + bytes(71)}, 801)])
def test_launch_errors_are_synchronous_and_do_not_stick(client: Client, options: dict, result: int) -> None:
    refused(result, lambda: client.launch("append", client.base, 1, **options))
    client.launch("append", client.base, 5)
    assert client.word(client.base) == 5
    assert client.device.error == 0


def test_launch_handles_and_parameters(client: Client) -> None:
    good = {"module": 17, "function": 0, "grid": (1, 1, 1), "block": (1, 1, 1), "shared": 0, "stream": 0,
            "parameters": bytes(16)}
    refused(400, client.device.launch, 90, Launch(**{**good, "module": 5}))
    refused(400, client.device.launch, 90, Launch(**{**good, "function": 99}))
    refused(1, client.device.launch, 90, Launch(**{**good, "parameters": bytes(15)}))
    client.device.load(18, stub.text("kernel small max_threads=64"), b"", False)
    small = {**good, "module": 18, "function": len(stub.KERNELS)}
    refused(701, client.device.launch, 90, Launch(**{**small, "block": (65, 1, 1)}))


def test_dynamic_shared_memory_is_opted_into(client: Client) -> None:
    device, index = client.device, stub.INDEX["append"]
    refused(1, lambda: client.launch("append", client.base, 1, shared=60 * 1024))
    device.set_function_attribute(17, index, 8, 60 * 1024)
    client.launch("append", client.base, 1, shared=60 * 1024)
    refused(1, device.set_function_attribute, 17, index, 8, 64 * 1024 + 1)
    refused(1, device.set_function_attribute, 17, index, 3, 1)
    refused(400, device.set_function_attribute, 17, 77, 8, 1)
    device.set_function_attribute(17, index, 9, 50)


def test_printf() -> None:
    device = CpuDevice(0, 64 << 20, 1, engine=stub)  # type: ignore[arg-type]
    try:
        client = Client(device)
        assert not device.text.printing
        client.launch("print", DEVICE_BASE)
        assert device.drain(WAIT)
        assert device.text.printing and device.text.waiting == 6
        assert (device.text.take(4), device.text.take(100), device.text.take(100)) == (b"hell", b"o\n", b"")
    finally:
        device.close()


def test_facts_are_those_of_a_turing_device(device: CpuDevice) -> None:
    facts = device.facts
    assert facts.compute_capability == (7, 5) and facts.driver_version == 13000
    a = facts.attributes
    assert (a[1], a[10], a[12], a[8], a[97], a[75], a[76], a[41], a[83], a[95]) == (
        1024, 32, 65536, 49152, 65536, 7, 5, 1, 1, 1)
    assert set(range(1, 149)) <= set(a)
    assert len(facts.uuid) == 16
    assert len({device_uuid(host, n) for host in ("a", "b") for n in (0, 1)}) == 4
    assert device_uuid("a", 0) == device_uuid("a", 0)


# -- linking -----------------------------------------------------------------------------------
MAIN = """//
// Generated
//
.version 8.0
.target sm_52
.address_size 64

.extern .func  (.param .b32 func_retval0) twice
(
\t.param .b32 twice_param_0
)
;
.extern .global .align 4 .u32 counter;
.global .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6, 7, 8}; // a { comment
.extern .shared .align 16 .b8 smem[];
.visible .entry main(
\t.param .u64 main_param_0
)
{
\t{ // inner
\tcall.uni (retval0), twice, (param0);
\t}
\tret;
}
"""
LIBRARY = """.version 8.3
.target sm_75
.address_size 64
.visible .global .align 4 .u32 counter = 7;
.extern .shared .align 16 .b8 smem[];
.weak .func (.param .b32 func_retval0) helper(.param .b32 p) { ret; }
.visible .func  (.param .b32 func_retval0) twice(
\t.param .b32 twice_param_0
)
{
\tret;
}
"""


def test_linking_resolves_externs_and_keeps_one_header(device: CpuDevice) -> None:
    library = fat(entry(1, 75, LIBRARY.encode(), "lz4"))
    binary, log = device.link([(1, "main", MAIN.encode() + b"\0"), (2, "lib", library)], b"")
    text = binary.rstrip(b"\0").decode()
    assert text.count(".version") == text.count(".target") == text.count(".address_size") == 1
    assert ".version 8.3" in text and ".target sm_75" in text
    assert text.count("twice(") == 1 and ".extern .func" not in text and ".extern .global" not in text
    assert text.count("smem[]") == 1
    assert "{1, 2, 3, 4, 5, 6, 7, 8};" in text
    assert text.index("twice(") < text.index("main(")
    assert "2" in log
    device.load(1, binary, b"", False)


def test_linking_one_input_changes_nothing() -> None:
    assert ptxlink.merge([("a", MAIN)]) == MAIN


def test_symbols_defined_twice(device: CpuDevice) -> None:
    error = refused(218, device.link, [(1, "a", LIBRARY.encode()), (1, "b", LIBRARY.encode())], b"")
    assert "counter" in error.message and "a" in error.message and "b" in error.message
    weak = ".version 8.0\n.target sm_75\n.weak .func helper() { ret; }\n"
    strong = weak.replace(".weak", ".visible")
    for order in ([weak, strong], [strong, weak], [weak, weak]):
        merged = ptxlink.merge([(str(i), text) for i, text in enumerate(order)])
        assert merged.count("helper") == 1
        assert (".visible" in merged) == (strong in order)


def test_local_symbols_stay_apart() -> None:
    head = ".version 8.0\n.target sm_75\n.address_size 64\n"
    one = head + ".global .align 1 .b8 $str[3] = {37, 100, 0};\n.visible .entry a() { mov.u64 %rd1, $str; ret; }\n"
    two = head + ".global .align 1 .b8 $str[2] = {10, 0};\n.visible .entry b() { mov.u64 %rd1, $str+1; ret; }\n"
    merged = ptxlink.merge([("one", one), ("two", two)])
    assert "$str[3] =" in merged and "$str$m1[2] =" in merged
    assert "mov.u64 %rd1, $str;" in merged and "mov.u64 %rd1, $str$m1+1;" in merged


def test_braces_in_strings_and_comments() -> None:
    text = (".version 8.0 // {\n.target sm_75\n/* } */\n.visible .entry a() { .pragma \"no{unroll // }\"; ret; }\n"
            ".visible .entry b() { ret; }\n")
    assert [item.name for item in ptxlink.parse("t", text).items] == ["a", "b"]


def test_linking_libraries_and_refusals(device: CpuDevice) -> None:
    archive = b"!<arch>\nobject/ " + bytes(8) + fat(entry(1, 75, LIBRARY.encode())) + b"tail"
    binary, _ = device.link([(1, "main", MAIN.encode()), (4, "lib.a", archive)], b"")
    assert b"twice(" in binary
    refused(209, device.link, [(0, "cubin", b"\x7fELF")], b"")
    refused(209, device.link, [(3, "object.o", fat(entry(2, 75, b"\x7fELF")))], b"")
    binary, log = device.link([(1, "main", MAIN.encode()), (4, "lib.a", fat(entry(2, 75, b"\x7fELF")))], b"")
    assert binary == MAIN.encode() + b"\0" and "lib.a is left out" in log
    refused(801, device.link, [(5, "nvvm", b"BC")], b"")
    refused(1, device.link, [], b"")
    refused(218, device.link, [(1, "a", MAIN.encode()), (1, "b", b".version x\n.target sm_75\n")], b"")
