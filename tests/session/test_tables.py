"""Session facts and module tables: round trips and hostile bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.session.errors import Corrupt, VersionMismatch
from rgpu.session.facts import DeviceInfo, SessionFacts
from rgpu.session.objects import module_table
from rgpu.session.objects.module_table import FunctionInfo, GlobalVariable, ModuleTable

u32, u64, i32 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(-2**31, 2**31 - 1)
names = st.text(max_size=12)
devices = st.builds(
    DeviceInfo, name=names, uuid=st.binary(min_size=16, max_size=16), total_memory=u64, pci=st.tuples(i32, i32, i32),
    range_base=u64, range_size=u64, attributes=st.dictionaries(i32, i32, max_size=5))
facts = st.builds(
    SessionFacts, name=names, number=u64, driver_version=u32, quota=u64, journal_limit=u64, recover=st.booleans(),
    devices=st.lists(devices, max_size=3).map(tuple))
tables = st.builds(
    ModuleTable,
    functions=st.lists(st.builds(
        FunctionInfo, name=names, parameters=st.lists(st.tuples(u32, u32), max_size=4).map(tuple),
        attributes=st.lists(i32, min_size=16, max_size=16).map(tuple)), max_size=4).map(tuple),
    globals=st.lists(st.builds(GlobalVariable, name=names, address=u64, size=st.integers(0, 2**63 - 1),
                              managed=st.booleans()), max_size=4).map(tuple))


@given(facts)
def test_facts_round_trip(value: SessionFacts) -> None:
    assert SessionFacts.decode(value.encode()) == value
    assert SessionFacts.from_dict(value.as_dict()) == value


def test_facts_layout() -> None:
    """The bytes of docs/protocols/shim.md (FactsHead, Device), written out."""
    device = DeviceInfo("gpu", bytes(range(16)), 7, (1, 2, -3), 0x2000_0000_0000, 0x0800_0000_0000, {75: 7, 16: -1})
    blob = SessionFacts("s/1", 9, 13000, 5, 6, True, (device,)).encode()
    want = b"".join((
        (1).to_bytes(4, "little"), (13000).to_bytes(4, "little"), (9).to_bytes(8, "little"), (5).to_bytes(8, "little"),
        (6).to_bytes(8, "little"), (1).to_bytes(4, "little"), (1).to_bytes(4, "little"), b"\x03\0s/1",
        bytes(range(16)), (1).to_bytes(4, "little"), (2).to_bytes(4, "little"), b"\xfd\xff\xff\xff", bytes(4),
        (7).to_bytes(8, "little"), (0x2000_0000_0000).to_bytes(8, "little"), (0x0800_0000_0000).to_bytes(8, "little"),
        b"\x03\0gpu", (2).to_bytes(4, "little"), (16).to_bytes(4, "little"), b"\xff\xff\xff\xff",
        (75).to_bytes(4, "little"), (7).to_bytes(4, "little")))
    assert blob == want


@given(facts, st.data())
def test_facts_cut_or_extended(value: SessionFacts, data: st.DataObject) -> None:
    blob = value.encode()
    with pytest.raises(Corrupt):
        SessionFacts.decode(blob[:data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(Corrupt):
        SessionFacts.decode(blob + b"\0")


@given(st.binary(max_size=200))
def test_facts_of_random_bytes(data: bytes) -> None:
    with pytest.raises((Corrupt, VersionMismatch)):
        SessionFacts.decode(data)


def test_facts_that_do_not_fit() -> None:
    good = SessionFacts("s", 1, 13000, 1, 1, False, (DeviceInfo("d", bytes(16), 1),))
    for bad in (replace(good, quota=-1), replace(good, driver_version=1 << 32),
                replace(good, devices=good.devices * 65),
                replace(good, devices=(DeviceInfo("d", bytes(15), 1),))):
        with pytest.raises(ValueError):
            bad.encode()
    for key in good.as_dict():
        with pytest.raises(Corrupt):
            SessionFacts.from_dict({**good.as_dict(), key: object()})
    for key in good.devices[0].as_dict():
        with pytest.raises(Corrupt):
            DeviceInfo.from_dict({**good.devices[0].as_dict(), key: object()})


@given(tables)
def test_table_round_trip(value: ModuleTable) -> None:
    assert module_table.decode(module_table.encode(value)) == value


@given(tables, st.data())
def test_table_cut_or_extended(value: ModuleTable, data: st.DataObject) -> None:
    blob = module_table.encode(value)
    with pytest.raises(Corrupt):
        module_table.decode(blob[:data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(Corrupt):
        module_table.decode(blob + b"\0")


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\xff\xff\xff\xff" + bytes(100), bytes(4) + b"\xff\xff\xff\x7f",
                                  b"\1\0\0\0\0\0\xff\xff\xff\xff" + bytes(64)])
def test_table_counts_that_cannot_be(data: bytes) -> None:
    with pytest.raises(Corrupt) as caught:
        module_table.decode(data)
    assert "offset" in caught.value.detail


def test_a_managed_variable_is_told_by_a_bit_of_its_size() -> None:
    variables = (GlobalVariable("m", 4096, 12, True), GlobalVariable("p", 8192, 1 << 40))
    back = module_table.decode(module_table.encode(ModuleTable((), variables))).globals
    assert back == variables and [variable.managed for variable in back] == [True, False]


def test_table_values_that_do_not_fit() -> None:
    for table in (ModuleTable((FunctionInfo("f", (), (1,) * 15),), ()), ModuleTable((), (GlobalVariable("g", -1, 1),)),
                  ModuleTable((), (GlobalVariable("g", 1, 1 << 63),)),
                  ModuleTable((), (GlobalVariable("g" * 70000, 1, 1),))):
        with pytest.raises(ValueError):
            module_table.encode(table)
