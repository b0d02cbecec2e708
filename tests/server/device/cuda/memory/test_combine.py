"""The kernel that combines contributions: the committed PTX, on the ``cpu`` device's engine, against the reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rgpu.server.collectives.reductions import reduce
from rgpu.server.device.cuda.collectives import combine
from rgpu.server.device.cuda.kernels import generate
from rgpu.server.device.cuda.memory import pagehash
from rgpu.session.objects.collectives import NO_PEER, DataType, Kind, Operation, Reduction
from tests.support.cuda.engine_driver import EngineDriver

RANKS = 3
FLOATS = {DataType.FLOAT16: np.uint16, DataType.BFLOAT16: np.uint16, DataType.FLOAT32: np.uint32,
          DataType.FLOAT64: np.uint64}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> EngineDriver:
    engine = EngineDriver()
    for where in (combine, pagehash):
        monkeypatch.setattr(where, "driver", engine)
    monkeypatch.setattr("rgpu.server.device.cuda.errors.driver", engine)
    monkeypatch.setattr(combine, "BLOCKS", 2)
    monkeypatch.setattr(combine, "THREADS", 64)
    return engine


def run(driver: EngineDriver, work: bytes, parts: list[tuple[int, int]]) -> None:
    module, name = pagehash.load_kernels("combine", (7, 5))
    assert name == "combine.ptx"
    _, kernel = driver.cuModuleGetFunction(module, b"rgpu_combine")
    block = np.frombuffer(bytearray(work), np.uint8)
    stream = driver.cuStreamCreateWithPriority(1, 0)[1]
    for begin, end in parts:
        combine.launch(kernel, combine.BLOCKS, combine.struct.pack("<QQQ", driver.give(block), begin, end), stream,
                       combine.THREADS)
    driver.cuStreamSynchronize(stream)


def placed(driver: EngineDriver, data: np.ndarray[Any, Any], shift: int) -> np.ndarray[Any, Any]:
    """A copy at a multiple of 256, plus ``shift``."""
    room = np.zeros(data.nbytes + 512, np.uint8)
    begin = -room.ctypes.data % 256 + shift
    driver.give(room)
    room[begin:begin + data.nbytes] = data.view(np.uint8)
    return room[begin:begin + data.nbytes]


def bits(kind: DataType, count: int) -> list[np.ndarray[Any, Any]]:
    """All kinds of numbers: also infinities, numbers that are not normal, and many sorts of NaN."""
    source = np.random.default_rng(kind)
    width = 8 * kind.size
    found = [source.integers(0, 1 << 63, count, np.uint64) << np.uint64(1) | source.integers(0, 2, count, np.uint64)
             for _ in range(RANKS)]
    values = [(one >> np.uint64(64 - width)).astype(FLOATS[kind]) for one in found]
    exponents = {DataType.FLOAT16: 0x7C00, DataType.BFLOAT16: 0x7F80, DataType.FLOAT32: 0x7F800000,
                 DataType.FLOAT64: 0x7FF << 52}
    high = np.array(exponents[kind], FLOATS[kind])
    for at, value in enumerate(values):
        value[at::7] |= high  # NaN
        value[at + 3::11] = high  # infinity
        value[at + 5::13] &= ~high  # subnormal
    values[1][3::11] = high | np.array(1 << (width - 1), FLOATS[kind])  # infinity less infinity
    return values


def operation(kind: Kind, data_type: DataType, receive: int, count: int, reduction: Reduction) -> Operation:
    return Operation(kind, data_type, reduction, NO_PEER, 1, 2, 0, receive, count)


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.AVG], ids=lambda one: one.name)
@pytest.mark.parametrize("kind", list(FLOATS), ids=lambda one: one.name)
def test_every_bit_is_that_of_the_host(driver: EngineDriver, kind: DataType, reduction: Reduction, shift: int) -> None:
    count = 1500 + 3
    values = bits(kind, count)
    sources = [placed(driver, value, 0) for value in values]
    result = placed(driver, np.zeros(count, FLOATS[kind]), shift)
    op = operation(Kind.ALL_REDUCE, kind, result.ctypes.data, count, reduction)
    assert combine.supports(op)
    half = op.size // 2 // 256 * 256
    run(driver, combine.work_of(op, 0, [source.ctypes.data for source in sources]), [(0, half), (half, 1 << 40)])
    wanted = reduce([value.view(np.uint8) for value in values], kind, reduction)
    differ = np.flatnonzero(result.view(FLOATS[kind]) != wanted.view(FLOATS[kind]))
    assert not differ.size, [tuple(hex(int(value[at])) for value in values) for at in differ[:3]]


@pytest.mark.parametrize("count", [640, 641])
def test_each_rank_gets_its_part_of_a_reduce_scatter_and_all_of_a_gather(driver: EngineDriver, count: int) -> None:
    source = np.random.default_rng(5)
    wide = [source.normal(0, 1, count * RANKS).astype(np.float32) for _ in range(RANKS)]
    given = [placed(driver, value, 0) for value in wide]
    total = wide[0] + wide[1] + wide[2]
    for rank in range(RANKS):
        result = placed(driver, np.zeros(count, np.float32), 0)
        op = operation(Kind.REDUCE_SCATTER, DataType.FLOAT32, result.ctypes.data, count, Reduction.SUM)
        run(driver, combine.work_of(op, rank, [one.ctypes.data for one in given]), [(0, op.size * RANKS)])
        assert np.array_equal(result.view(np.float32), total[rank * count:][:count])
    result = placed(driver, np.zeros(count * RANKS, np.float32), 0)
    op = operation(Kind.ALL_GATHER, DataType.INT8, result.ctypes.data, count * 4, Reduction.SUM)
    run(driver, combine.work_of(op, 1, [one.ctypes.data for one in given]), [(0, 1280), (1280, op.size)])
    assert np.array_equal(result.view(np.float32), np.concatenate([value[:count] for value in wide]))


def test_nothing_writes_nothing_and_a_copy_all(driver: EngineDriver) -> None:
    source = placed(driver, np.arange(1000, dtype=np.uint8), 0)
    result = placed(driver, np.zeros(1000, np.uint8), 3)
    run(driver, combine.nothing(), [(0, 1000)])
    assert not result.any() and len(combine.nothing()) == combine.BYTES
    run(driver, combine.copy_of(result.ctypes.data, source.ctypes.data, 1000), [(0, 1000)])
    assert np.array_equal(result, source)


def test_what_goes_through_the_host() -> None:
    op = operation(Kind.ALL_REDUCE, DataType.FLOAT32, 0, 1, Reduction.SUM)
    assert combine.supports(op) and combine.supports(operation(Kind.ALL_GATHER, DataType.INT64, 0, 1, Reduction.SUM))
    for kind, data_type, reduction in ((Kind.ALL_REDUCE, DataType.INT32, Reduction.SUM),
                                       (Kind.ALL_REDUCE, DataType.FLOAT32, Reduction.MAX),
                                       (Kind.REDUCE_SCATTER, DataType.FLOAT32, Reduction.PREMULSUM),
                                       (Kind.BROADCAST, DataType.FLOAT32, Reduction.SUM)):
        assert not combine.supports(operation(kind, data_type, 0, 1, reduction))


def test_the_module_holds_nothing_but_code() -> None:
    """No variables: they would lie before the session's own (SEMANTICS 12)."""
    text = (generate.FOLDER / "combine.ptx").read_text()
    assert not [line for line in text.splitlines() if line.startswith((".global", ".const", ".visible .global"))]
