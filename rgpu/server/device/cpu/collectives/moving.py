"""The data of a collective whose ranks have all come: read from the ranks' memory, written to it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rgpu.server.device.cpu.collectives.matching import Posting
from rgpu.server.device.cpu.collectives.numbers import Array
from rgpu.server.device.cpu.collectives.reductions import reduce
from rgpu.session.objects.collectives import Kind, Reduction

#: (address, bytes) → the memory there
Memory = Callable[[int, int], Array]


def carry_out(together: list[Posting], memory: Memory) -> None:
    """Everything is read before anything is written, since buffers may be in place."""
    op = together[0].operation
    size, ranks = op.size, len(together)
    if not size:
        return
    if op.kind.paired:
        memory(together[1].operation.receive, size)[:] = memory(op.send, size).copy()
        return
    sent = [memory(posting.operation.send, reads * size).copy() if reads else None for posting in together
            for reads in (op.kind.extent(ranks, posting.rank, op.peer)[0],)]
    results = _results(together, [np.empty(0, np.uint8) if part is None else part for part in sent], memory)
    for posting, result in zip(together, results, strict=True):
        if op.kind.extent(ranks, posting.rank, op.peer)[1]:
            memory(posting.operation.receive, result.size)[:] = result


def _results(together: list[Posting], sent: list[Array], memory: Memory) -> list[Array]:
    op = together[0].operation
    size, ranks = op.size, len(together)
    if op.kind.reduces:
        total = reduce(sent, op.data_type, op.reduction, _scalars(together, memory))
        return [total] * ranks if op.kind is not Kind.REDUCE_SCATTER else list(total.reshape(ranks, size))
    if op.kind is Kind.BROADCAST:
        return [sent[op.peer]] * ranks
    if op.kind is Kind.SCATTER:
        return list(sent[op.peer].reshape(ranks, size))
    if op.kind is Kind.ALL_TO_ALL:
        return [np.concatenate([part[rank * size:(rank + 1) * size] for part in sent]) for rank in range(ranks)]
    return [np.concatenate(sent)] * ranks  # ALL_GATHER, GATHER


def _scalars(together: list[Posting], memory: Memory) -> list[bytes]:
    op = together[0].operation
    if op.reduction is not Reduction.PREMULSUM:
        return []
    width = op.data_type.size
    return [memory(posting.operation.scalar, width).tobytes() if posting.operation.on_device
            else posting.operation.scalar.to_bytes(8, "little")[:width] for posting in together]
