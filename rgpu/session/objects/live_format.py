"""Form of the live objects of a session in checkpoints and moves: a dict for msgpack, module binaries once each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import Record
from rgpu.session.objects import object_calls, structure
from rgpu.session.objects.load_answers import LOAD, LoadAnswer
from rgpu.session.objects.module_table import GlobalVariable
from rgpu.session.objects.object_table import ObjectTable

_INSTANTIATE = BY_NAME["graph_instantiate"].id


def to_dict(table: ObjectTable) -> dict[str, Any]:
    """Return the objects as checkpoints and moves carry them, for msgpack; module binaries once each."""
    digests = list(table.contents)
    index = {digest: number for number, digest in enumerate(digests)}
    calls, answers = [], []
    for record in structure.calls(table):
        item = table.objects.get(record.seq)
        load = item if record.call_id == LOAD else None
        if record.call_id == _INSTANTIATE:
            calls.append([record.seq, record.call_id, record.thread, record.flags, record.args, record.payload])
            continue
        calls.append([record.seq, record.call_id, record.thread, record.flags, record.args,
                      index[load.digest] if load else -1])
        if load and load.answer:
            variables = load.answer.globals
            answers.append([record.seq, load.answer.functions, load.answer.globals_digest,
                            None if variables is None else [[v.name, v.address, v.size] for v in variables]])
    return {"version": 1, "position": table.position, "payloads": [table.contents[d] for d in digests],
            "calls": calls, "answers": answers}


def from_dict(data: Any, digests: Sequence[bytes] = ()) -> ObjectTable:
    """Invert :func:`to_dict`. Raises :class:`Corrupt` for anything else.

    ``digests``: BLAKE3 of the payloads, empty where the caller does not have it.
    """
    found = ObjectTable()
    try:
        if data["version"] != 1:
            raise ValueError(f"version {data['version']}")
        payloads = [_typed(payload, bytes) for payload in _typed(data["payloads"], list)]
        rows = _typed(data["calls"], list)
        if len({row[0] for row in rows}) != len(rows):
            raise ValueError("two calls at one position")
        for row in rows:
            _apply_row(found, row, payloads, digests)
        for seq, functions, digest, variables in _typed(data["answers"], list):
            _answer_row(found, _typed(seq, int), LoadAnswer(
                _typed(functions, int), _typed(digest, bytes), None if variables is None else tuple(
                    GlobalVariable(_typed(n, str), _typed(a, int), _typed(s, int)) for n, a, s in variables)))
        found.position = _typed(data["position"], int)
        found.check()
    except (KeyError, TypeError, ValueError, IndexError, AssertionError) as error:
        raise Corrupt(f"live objects: {error!r}", offset=0, reason="live objects") from None
    return found


def _apply_row(table: ObjectTable, row: Any, payloads: list[bytes], digests: Sequence[bytes]) -> None:
    seq, call_id, thread, flags, args, payload = row
    for value in (seq, call_id, thread, flags):
        _typed(value, int)
    if call_id == _INSTANTIATE:  # its nodes are stored in the row itself
        if seq <= 0 or seq in table.objects:
            raise ValueError(f"call {call_id} at position {seq}")
        object_calls.apply(table, Record(seq, call_id, _typed(args, bytes), _typed(payload, bytes), thread, flags))
        return
    _typed(payload, int)
    if call_id not in object_calls.HANDLERS or seq <= 0 or seq in table.objects or (payload >= 0) != (call_id == LOAD):
        raise ValueError(f"call {call_id} at position {seq}")
    digest = digests[payload] if 0 <= payload < len(digests) else b""
    object_calls.apply(table, Record(seq, call_id, _typed(args, bytes), payloads[payload] if payload >= 0 else b"",
                                     thread, flags), digest)


def _answer_row(table: ObjectTable, seq: int, answer: LoadAnswer) -> None:
    item = table.objects[seq]
    if item.kind != "module" or seq not in table.pending or (answer.globals is None) != (item.ended is not None):
        raise ValueError(f"an answer to call {seq}")
    table.pending.discard(seq)
    item.answer = answer


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} is no {kind.__name__}")
    return value
