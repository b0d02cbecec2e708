"""The data of a collective whose ranks have all come: read from the ranks' memory, written to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rgpu.server.collectives.matching import Memory, Posting
from rgpu.server.collectives.numbers import Array
from rgpu.server.collectives.reductions import copy, reduce
from rgpu.session.objects.collectives import Kind, Operation, Reduction


def carry_out(together: list[Posting]) -> None:
    """Move the data of operations that belong together, one of each rank.

    Everything is read before anything is written, since buffers may be in place.
    """
    op = together[0].operation
    size, ranks = op.size, len(together)
    if not size:
        return
    if op.kind.paired:
        message = together[0].memory.source(op.send, size).copy()
        together[1].memory.target(together[1].operation.receive, size)[:] = message
        return
    sent = [posting.memory.source(posting.operation.send, reads * size).copy() if reads else np.empty(0, np.uint8)
            for posting in together for reads in (op.kind.extent(ranks, posting.rank, op.peer)[0],)]
    results = results_of(op, sent, [scalar_of(posting.operation, posting.memory) for posting in together])
    for posting, result in zip(together, results, strict=True):
        if op.kind.extent(ranks, posting.rank, op.peer)[1]:
            posting.memory.target(posting.operation.receive, result.size)[:] = result


def results_of(op: Operation, sent: Sequence[Array], scalars: Sequence[bytes]) -> list[Array]:
    """Return what each rank gets, in the order of ranks. ``scalars``: the factors of PREMULSUM."""
    size, ranks = op.size, len(sent)
    if op.kind.reduces:
        total = reduce(sent, op.data_type, op.reduction, scalars if op.reduction is Reduction.PREMULSUM else ())
        return [total] * ranks if op.kind is not Kind.REDUCE_SCATTER else list(total.reshape(ranks, size))
    if op.kind is Kind.BROADCAST:
        return [sent[op.peer]] * ranks
    if op.kind is Kind.SCATTER:
        return list(sent[op.peer].reshape(ranks, size))
    if op.kind is Kind.ALL_TO_ALL:
        return [np.concatenate([part[rank * size:(rank + 1) * size] for part in sent]) for rank in range(ranks)]
    return [np.concatenate(sent)] * ranks  # ALL_GATHER, GATHER


def result_into(out: Array, op: Operation, rank: int, sent: Sequence[Array], scalars: Sequence[bytes]) -> None:
    """Have what one rank gets (:func:`results_of`) in ``out``, which shares no memory with ``sent``."""
    size = op.size
    if op.kind.reduces:
        parts = [part[rank * size:(rank + 1) * size] for part in sent] if op.kind is Kind.REDUCE_SCATTER else sent
        reduce(parts, op.data_type, op.reduction, scalars if op.reduction is Reduction.PREMULSUM else (), out)
    elif op.kind is Kind.BROADCAST:
        copy(out, sent[op.peer])
    elif op.kind is Kind.SCATTER:
        copy(out, sent[op.peer][rank * size:(rank + 1) * size])
    else:
        for number, part in enumerate(sent):
            copy(out[number * size:(number + 1) * size],
                 part[rank * size:(rank + 1) * size] if op.kind is Kind.ALL_TO_ALL else part)


def scalar_of(op: Operation, memory: Memory) -> bytes:
    """Return the bytes of an operation's factor; empty where it has none."""
    if op.reduction is not Reduction.PREMULSUM:
        return b""
    width = op.data_type.size
    return memory.source(op.scalar, width).tobytes() if op.on_device else op.scalar.to_bytes(8, "little")[:width]
