"""What a load learned is kept: the next worker describes and compiles nothing; what does not fit is made anew."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.server import derived_format
from rgpu.server.derived import Derived
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.session.errors import DeviceError
from rgpu.session.objects.module_table import ModuleTable
from tests.support.fake_driver.support import BINARY, driver

TEXT = b".version 8.0\nlater 12\nearlier 8\n"


@pytest.fixture
def slow_compiler() -> Iterator[None]:
    driver().fake_compile_ms(60)
    yield
    driver().fake_compile_ms(0)


def load(path: Path, binary: bytes, options: bytes = b"") -> tuple[ModuleTable, CudaDevice]:
    """Load in a new worker's device, and let its file be written."""
    device = CudaDevice(0)
    try:
        device.derived.adopt(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        device.create_context(16, 0, True)
        device.notes.begin()
        table, _ = device.load(17, binary, options, False)
        assert device.derived.flush(10)
        return table, device
    finally:
        device.close()


def attribute_calls() -> int:
    return ctypes.c_uint(driver().fake_attribute_calls()).value


def links() -> int:
    return ctypes.c_uint(driver().fake_links()).value


def names(table: ModuleTable) -> list[str]:
    return [function.name for function in table.functions]


def test_a_second_load_asks_nothing_of_each_kernel(tmp_path: Path) -> None:
    path = tmp_path / "derived"
    first, device = load(path, BINARY)
    assert device.notes.described is False
    before = attribute_calls()
    second, device = load(path, BINARY)
    assert device.notes.described is True and attribute_calls() == before
    assert second.functions == first.functions and len(second.functions) == 4
    assert [(v.name, v.size) for v in second.globals] == [(v.name, v.size) for v in first.globals] == [("counter", 64)]
    other, device = load(path, BINARY, options=(0).to_bytes(4, "little") + (32).to_bytes(8, "little"))
    assert device.notes.described is False and other.functions == first.functions


def test_a_description_that_does_not_fit_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "derived"
    load(path, b"one 8\ntwo 8\n")
    data = path.read_bytes()
    at = derived_format.HEADER.size
    entry = derived_format.read_entry(data[at:], at)
    _, device = load(path, b"two 8\none 8\n")
    foreign = device.derived
    assert foreign.counters.stored == 1
    # Under this key lies what another module is like.
    wrong = path.read_bytes()
    last = derived_format.read_entry(wrong[at + derived_format.ENTRY + entry.length:])
    body = data[at + derived_format.ENTRY:at + derived_format.ENTRY + entry.length]
    path.write_bytes(wrong + derived_format.pack_entry(last.kind, last.key, body))
    table, device = load(path, b"two 8\none 8\n")
    assert names(table) == ["two", "one"] and device.notes.described is False
    table, device = load(path, b"two 8\none 8\n")
    assert names(table) == ["two", "one"] and device.notes.described is True


def test_a_damaged_entry_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "derived"
    first, _ = load(path, BINARY)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    again, device = load(path, BINARY)
    assert again.functions == first.functions
    assert (device.notes.described, device.derived.counters.damaged) == (False, 1)
    _, device = load(path, BINARY)
    assert (device.notes.described, device.derived.counters.damaged) == (True, 0)


@pytest.mark.usefixtures("slow_compiler")
def test_ptx_is_compiled_once_more_and_never_again(tmp_path: Path) -> None:
    """The linker gives the kernels in another order: the table keeps that of the text, by which journals name them."""
    path, before = tmp_path / "derived", links()
    first, device = load(path, TEXT)
    assert names(first) == ["later", "earlier"] and device.notes.compiled is None
    second, device = load(path, TEXT)
    assert second == first and device.notes.compiled is False and links() == before + 1
    third, device = load(path, TEXT)
    assert third == first and device.notes.compiled is True and links() == before + 1
    assert device.notes.seconds["load"] < 0.05 <= 0.06


@pytest.mark.usefixtures("slow_compiler")
@pytest.mark.parametrize("text", [TEXT + b".global .b8 counter[64];\n", TEXT + b"unlinkable\n"])
def test_ptx_whose_machine_code_is_another_module_is_loaded_as_text(tmp_path: Path, text: bytes) -> None:
    """What is linked here has no variables, or is refused: the text is loaded, and it is not tried again."""
    path, before = tmp_path / "derived", links()
    first, _ = load(path, text)
    for _ in range(2):
        table, device = load(path, text)
        assert table.functions == first.functions and [v.name for v in table.globals] == [v.name for v in first.globals]
        assert links() == before + 1 and device.notes.compiled in (None, False) and device.notes.described is True


def test_a_module_that_does_not_load(tmp_path: Path) -> None:
    path = tmp_path / "derived"
    for _ in range(2):
        with pytest.raises(DeviceError) as caught:
            load(path, b"bad\n")
        assert caught.value.result == 218
    assert not path.stat().st_size


def test_without_a_file_nothing_is_kept() -> None:
    device = CudaDevice(0)
    try:
        device.create_context(16, 0, True)
        device.load(17, BINARY, b"", False)
        assert device.derived.statistics() == dict.fromkeys(vars(Derived().counters), 0)
    finally:
        device.close()
