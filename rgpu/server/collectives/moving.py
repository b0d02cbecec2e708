"""The data of a collective whose ranks have all come: read from the ranks' memory, written to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rgpu.server.collectives.matching import Memory, Posting
from rgpu.server.collectives.numbers import Array
from rgpu.server.collectives.reductions import reduce
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
        message = np.frombuffer(together[0].memory.read(op.send, size), np.uint8)
        together[1].memory.write(together[1].operation.receive, message)
        return
    sent = [posting.memory.read(posting.operation.send, reads * size) if reads else b"" for posting in together
            for reads in (op.kind.extent(ranks, posting.rank, op.peer)[0],)]
    results = results_of(op, [np.frombuffer(part, np.uint8) for part in sent],
                         [scalar_of(posting.operation, posting.memory) for posting in together])
    for posting, result in zip(together, results, strict=True):
        if op.kind.extent(ranks, posting.rank, op.peer)[1]:
            posting.memory.write(posting.operation.receive, result)


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


def scalar_of(op: Operation, memory: Memory) -> bytes:
    """Return the bytes of an operation's factor; empty where it has none."""
    if op.reduction is not Reduction.PREMULSUM:
        return b""
    width = op.data_type.size
    return memory.read(op.scalar, width) if op.on_device else op.scalar.to_bytes(8, "little")[:width]
