"""Each table is whole, says what was on the wire before there were tables, and what is generated follows from it."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.link.data.published import Ping, read_pong
from rgpu.link.messages import control, data, memory, pages, rank_memory, ranks, shim
from rgpu.link.protocols import generate
from rgpu.link.protocols.control import CONTROL
from rgpu.link.protocols.data import DATA, MEMORY
from rgpu.link.protocols.emit import camel, snake
from rgpu.link.protocols.generate import PROTOCOLS
from rgpu.link.protocols.pages import PAGES
from rgpu.link.protocols.shim import SHIM
from rgpu.link.protocols.table import Form, Message, Protocol, Record, Way, message
from rgpu.session import facts, observed
from tests.link.protocols import codec, recorded

MODULES = {"shim": shim, "data": data, "memory": memory, "pages": pages, "ranks": ranks, "rank_memory": rank_memory,
           "control": control}
GOLDEN = json.loads(recorded.GOLDEN.read_text())
EVERY = [pytest.param(protocol, one, id=f"{protocol.name}-{one.name}")
         for protocol in PROTOCOLS for one in protocol.messages]
HEADER = generate.root() / "rgpu/link/messages/native/shim_link.hpp"


# -- what follows from the tables -----------------------------------------------------------------
def test_what_is_generated_is_up_to_date() -> None:
    assert generate.stale(generate.root()) == [], "run python -m rgpu.link.protocols.generate"


def test_what_is_generated_is_compared_byte_for_byte(tmp_path: Path) -> None:
    assert sorted(generate.write(tmp_path)) == sorted(generate.OUTPUTS)
    assert generate.stale(tmp_path) == []
    for name in generate.OUTPUTS:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"\n")
        assert generate.stale(tmp_path) == [name]
        generate.write(tmp_path)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_a_table_is_whole(protocol: Protocol) -> None:
    names = [one.name for one in protocol.messages]
    numbers = [one.number for one in protocol.messages if one.number]
    assert len(set(names)) == len(names) and len(set(numbers)) == len(numbers)
    assert not set(names) & {one.name for one in protocol.constants}
    for one in protocol.messages:
        fields = protocol.fields(one)
        assert one.doc.endswith(".") and 1 <= one.since <= protocol.version
        assert len({field.name for field in fields}) == len(fields), one.name
        assert all(1 <= field.since <= protocol.version for field in fields)
        if one.form is Form.PACKED:
            for at, field in enumerate(fields):
                known = field.base in codec.RANGES or field.base in ("bytes", "text") or protocol.record(field.base)
                assert known and (not field.count or field.count == "*" or field.count in
                                  {earlier.name for earlier in fields[:at]}), (one.name, field)
                assert field.count != "*" or at == len(fields) - 1, "nothing stands behind what goes to the end"


def test_a_line_that_is_no_field_is_refused() -> None:
    with pytest.raises(ValueError, match="no field"):
        message(1, "X", Way.TO, "A message.", "u32")


# -- as it was before -----------------------------------------------------------------------------
def test_no_number_changed() -> None:
    found = {protocol.name: {one.name: one.number for one in protocol.messages} for protocol in PROTOCOLS
             if protocol.name != "control"}
    assert found == GOLDEN["numbers"]


def test_no_constant_changed() -> None:
    versions = {"shim": "PROTOCOL", "data": "VERSION"}
    for name, values in GOLDEN["constants"].items():
        for constant, value in values.items():
            if constant == "SEGMENT_HEADER_SIZE":
                assert shim.SEGMENT_HEADER_LAYOUT.size == value
            else:
                renamed = {versions.get(name): "VERSION", "REFUSED": "PREAMBLE_REFUSED"}.get(constant, constant)
                assert getattr(MODULES[name], renamed) == value, (name, constant)


def test_no_layout_changed() -> None:
    for name, layouts in GOLDEN["layouts"].items():
        protocol = {each.name: each for each in PROTOCOLS}[name]
        for record, text in layouts.items():
            assert protocol.record(record).format == text, (name, record)
    for record, fields in GOLDEN["arrays"].items():
        found = getattr(pages, f"{snake(record)}_LAYOUT")
        assert {name: [str(found.fields[name][0]), found.fields[name][1]] for name in found.names} == fields


def test_the_product_still_writes_the_bytes_it_wrote() -> None:
    """Every message, written by the code that sends it; golden.json is of the code before the tables."""
    now = recorded.record()
    for name, bodies in GOLDEN["bodies"].items():
        assert now[name] == bodies, name
    assert sorted(now) == sorted(GOLDEN["bodies"])


def _golden() -> list[Any]:
    """(protocol, message, body) of each recorded body that is kept whole."""
    found = []
    for name, protocol in (("to_shim", SHIM), ("from_shim", SHIM), ("to_worker", DATA), ("to_agent", DATA),
                           ("pages", PAGES), ("replayed", PAGES)):
        numbered = {one.number: one for one in protocol.messages}
        for number, bodies in GOLDEN["bodies"][name].items():
            if not number.isdigit() or int(number) == 99:
                continue
            found += [pytest.param(protocol, numbered[int(number)], bytes.fromhex(body),
                                   id=f"{name}-{numbered[int(number)].name}-{at}")
                      for at, body in enumerate(bodies) if "…" not in body]
    return found


@pytest.mark.parametrize(("protocol", "one", "body"), _golden())
def test_recorded_bodies_are_what_the_tables_say(protocol: Protocol, one: Message, body: bytes) -> None:
    if one is SHIM.message("HELLO"):
        body += bytes(2)  # the recorder takes the name away
    if one is DATA.message("PING") or one is DATA.message("PONG"):
        assert len(body) >= 8
    assert codec.encode(protocol, one, codec.decode(protocol, one, body)) == body


def test_every_message_was_recorded() -> None:
    """OBSERVE stands apart, whole; ANSWER_AT only in ``ring``; the rest in client/nccl and shim/link/test_list.py."""
    seen = {(protocol.name, one.name) for protocol, one, _ in (case.values for case in _golden())}
    seen |= {("shim", name) for name in ("OBSERVE", "ANSWER_AT", "GATHER", "GATHERED", "LIST", "CHOOSE", "LISTED")}
    assert seen == {(protocol.name, one.name) for protocol in (SHIM, DATA, PAGES) for one in protocol.messages}


def test_the_recorded_question_of_a_monitor() -> None:
    head = codec.Reader(SHIM, bytes.fromhex(GOLDEN["bodies"]["from_shim"]["observe"]))
    assert head.record(SHIM.record("MessageHead")) == {"length": 4, "type": SHIM.message("OBSERVE").number}
    assert head.record(SHIM.message("OBSERVE")) == {"protocol": SHIM.version}


def test_recorded_packets_of_the_memory_socket() -> None:
    numbered = {one.number: one for one in MEMORY.messages}
    seen = set()
    for text in GOLDEN["bodies"]["memory"]:
        packet = bytes.fromhex(text)
        one = numbered[struct.unpack_from("<I", packet)[0]]
        seen.add(one.name)
        assert codec.encode(MEMORY, one, codec.decode(MEMORY, one, packet[4:])) == packet[4:]
    assert seen == {one.name for one in MEMORY.messages}


def test_recorded_control_messages() -> None:
    names = {"request": ["REQUEST"], "bare": ["REQUEST"], "pool.ping": ["REPLY"], "session.kill": ["REFUSAL"],
             "session.migrate": ["PROGRESS"] * 4 + ["REPLY"]}
    for verb, bodies in GOLDEN["bodies"]["control"].items():
        for name, body in zip(names[verb], bodies, strict=True):
            codec.check_map(CONTROL, CONTROL.message(name), bytes.fromhex(body))


# -- any values -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("protocol", "one"), EVERY)
@settings(max_examples=40, deadline=None)
@given(values=st.data())
def test_every_message_comes_back(protocol: Protocol, one: Message, values: st.DataObject) -> None:
    said = values.draw(codec.values_of(protocol, one))
    body = codec.encode(protocol, one, said)
    assert codec.decode(protocol, one, body) == said
    if one.form is Form.PACKED and body and not any(field.count == "*" for field in protocol.fields(one)):
        with pytest.raises(codec.Wrong):
            codec.decode(protocol, one, body + b"\0")
        with pytest.raises(codec.Wrong):
            codec.decode(protocol, one, body[:-1])


LAYOUTS = [pytest.param(protocol, record, id=f"{protocol.name}-{record.name}")
           for protocol in PROTOCOLS for record in protocol.records if record.fixed and record.python]


@pytest.mark.parametrize(("protocol", "record"), LAYOUTS)
@settings(max_examples=30, deadline=None)
@given(values=st.data())
def test_the_modules_layouts_agree_with_the_tables(protocol: Protocol, record: Record, values: st.DataObject) -> None:
    layout = getattr(MODULES[protocol.name], f"{snake(record.name)}_LAYOUT")
    said = values.draw(codec._record(protocol, record.plain))
    body = codec.pack(protocol, record, said)
    if record.array:
        assert layout.itemsize == record.size == len(body)
        row = np.frombuffer(body, layout)[0]
        assert {name: list(map(int, row[name])) if row[name].shape else int(row[name]) for name in layout.names} == said
        return
    flat = [part for field in record.plain for part in
            (said[field.name] if field.times else [said[field.name]])]
    assert layout.size == record.size and layout.pack(*flat) == body


@pytest.mark.parametrize(("protocol", "one"), [case for case in EVERY if case.values[1].struct])
@settings(max_examples=30, deadline=None)
@given(values=st.data())
def test_the_modules_records_agree_with_the_tables(protocol: Protocol, one: Message, values: st.DataObject) -> None:
    kind = getattr(MODULES[protocol.name], one.struct)
    said = values.draw(codec.values_of(protocol, one))
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=kind)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(found))
    codec.check_map(protocol, one, msgspec.msgpack.encode(found))

    def held(wanted: Any, there: Any) -> bool:
        if isinstance(wanted, dict):
            return all(held(value, there[key]) for key, value in wanted.items())
        return bool(wanted == there)

    assert held(said, again) and list(again) == [field.name for field in protocol.fields(one)]


def test_fields_of_protocol_2_may_be_left_out() -> None:
    """PING and PONG of protocol 1 are their first field alone."""
    for name in ("Ping", "Pong"):
        fields = DATA.record(name).plain
        assert [field.since for field in fields] == [1] + [2] * (len(fields) - 1)
    assert DATA.record("Position").format == "<" + DATA.record("Ping").plain[0].code
    assert Ping.unpack(struct.pack("<Q", 9)) == Ping(9, None) and read_pong(struct.pack("<Q", 9)) == (9, None)


def test_session_facts_are_what_the_table_says() -> None:
    """rgpu.session knows no links, so it has its own layouts of WELCOME and OBSERVED."""
    assert {"FactsHead": facts._HEAD.format, "FactsDevice": facts._DEVICE.format, "ObservedHead": observed._HEAD.format,
            "FactsAttribute": facts._ATTRIBUTE.format, "ObservedProcess": observed._PROCESS.format} == {
        name: SHIM.record(name).format for name in ("FactsHead", "FactsDevice", "ObservedHead", "FactsAttribute",
                                                     "ObservedProcess")}
    assert (facts.VERSION, observed.VERSION) == (shim.FACTS_VERSION, shim.OBSERVED_VERSION)


# -- C++ ------------------------------------------------------------------------------------------
def test_the_header_compiles_and_checks_every_layout(tmp_path: Path) -> None:
    text = HEADER.read_text()
    for record in SHIM.records:
        if record.cpp:
            assert f"static_assert(sizeof({record.name}) == {record.size});" in text
            for field, offset in record.offsets():
                assert f"static_assert(offsetof({record.name}, {field.name}) == {offset});" in text
    for one in SHIM.messages:
        assert f"{camel(one.name)} = {one.number}," in text
    for name, size in GOLDEN["cpp"].items():
        if name not in ("RecordHeader", "ExternalPayload"):  # the journal's: rgpu.session.calls
            assert SHIM.record(name).size == size
    source = tmp_path / "t.cpp"
    source.write_text('#include "shim_link.hpp"\n')
    flags = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I"]
    subprocess.run([*flags, str(HEADER.parent), str(source)], check=True)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    changed = text.replace("    uint32_t pid;\n", "    uint64_t pid;\n", 1)
    assert changed != text
    (wrong / "shim_link.hpp").write_text(changed)
    assert subprocess.run([*flags, str(wrong), str(source)], capture_output=True).returncode, "a layout is not checked"


def test_no_number_is_written_by_hand() -> None:
    """Types of messages stand in the tables: neither Python nor C++ has a list of them beside."""
    root = generate.root()
    names = {one.name for protocol in PROTOCOLS for one in protocol.messages if one.number}
    found = []
    for path in [*root.glob("rgpu/**/*.py"), *root.glob("rgpu/**/*.[ch]pp")]:
        if root / "rgpu/link/messages" in path.parents or root / "rgpu/link/protocols" in path.parents \
                or root / "rgpu/checkpoint" in path.parents or "generated" in path.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            left = re.match(r"\s*(?:constexpr std::uint32_t )?([A-Z_]+(?:, [A-Z_]+)*)(?: = \d+)", line)
            listed = set(left[1].split(", ")) if left else set()
            if len(listed & names) > 1 or listed & {"PING", "PONG", "OBSERVE", "ATTACH"}:
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
