"""Numbers and reductions of all types, against numpy in the order of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rgpu.server.collectives import native
from rgpu.server.collectives.numbers import is_integer, narrow, widen
from rgpu.server.collectives.reductions import BLOCK, SHARED, copy, reduce, scalar_bytes
from rgpu.session.objects.collectives import DataType, Reduction

RANKS, COUNT = 5, 257
PLAIN = {DataType.INT8: np.int8, DataType.UINT8: np.uint8, DataType.INT32: np.int32, DataType.UINT32: np.uint32,
         DataType.INT64: np.int64, DataType.UINT64: np.uint64, DataType.FLOAT16: np.float16,
         DataType.FLOAT32: np.float32, DataType.FLOAT64: np.float64}
SMALL = [kind for kind in DataType if kind not in PLAIN]


def bytes_of(values: Any) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(values).view(np.uint8)


@pytest.mark.parametrize("kind", list(PLAIN), ids=lambda kind: kind.name)
@pytest.mark.parametrize("reduction", list(Reduction), ids=lambda one: one.name)
def test_plain_types(kind: DataType, reduction: Reduction) -> None:
    dtype = np.dtype(PLAIN[kind])
    source = np.random.default_rng(kind)
    if dtype.kind == "f":
        given = [source.normal(0, 3, COUNT).astype(dtype) for _ in range(RANKS)]
    else:
        given = [source.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, COUNT, dtype, True) for _ in range(RANKS)]
    factors = [dtype.type(rank + 2) for rank in range(RANKS)]
    scaled = list(given)
    if reduction is Reduction.PREMULSUM:
        scaled = [part * factor for part, factor in zip(given, factors, strict=True)]
    if reduction is Reduction.AVG and dtype.kind == "f":
        scaled = [part * dtype.type(1 / RANKS) for part in given]
    step = {Reduction.PROD: np.multiply, Reduction.MAX: np.maximum, Reduction.MIN: np.minimum}.get(reduction, np.add)
    with np.errstate(over="ignore"):
        wanted = scaled[0]
        for part in scaled[1:]:
            wanted = step(wanted, part)
    if reduction is Reduction.AVG and dtype.kind != "f":
        wanted = np.array([abs(int(x)) // RANKS * (-1 if x < 0 else 1) for x in wanted]).astype(dtype)
    scalars = [factor.tobytes() for factor in factors] if reduction is Reduction.PREMULSUM else []
    found = reduce([bytes_of(part) for part in given], kind, reduction, scalars)
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
def test_what_numpy_lacks_is_widened_and_rounded_at_each_step(kind: DataType) -> None:
    source = np.random.default_rng(3)
    given = [narrow(source.normal(0, 2, COUNT).astype(np.float32), kind) for _ in range(RANKS)]
    total = widen(given[0], kind)
    for part in given[1:]:
        total = widen(narrow(total + widen(part, kind), kind), kind)
    assert reduce(given, kind, Reduction.SUM).tobytes() == narrow(total, kind).tobytes()
    assert (widen(reduce(given, kind, Reduction.MAX), kind) == np.max([widen(p, kind) for p in given], axis=0)).all()


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
def test_every_code_survives(kind: DataType) -> None:
    codes = np.arange(256, dtype=np.uint8) if kind.size == 1 else np.arange(1 << 16, dtype="<u2").view(np.uint8)
    values = widen(codes, kind)
    again = narrow(values, kind)
    whole = ~np.isnan(values) & (np.isfinite(values) | (kind is DataType.BFLOAT16))
    width = "<u1" if kind.size == 1 else "<u2"
    assert (again.view(width)[whole] == codes.view(width)[whole]).all()
    assert np.isnan(widen(again, kind)[np.isnan(values)]).all()


def test_eight_bit_floats() -> None:
    """Values of OCP FP8 1.0, table 2; ties to even; what is too large is the largest."""
    def e4m3(value: float) -> int:
        return int(narrow(np.float32([value]), DataType.FLOAT8E4M3)[0])

    def e5m2(value: float) -> int:
        return int(narrow(np.float32([value]), DataType.FLOAT8E5M2)[0])

    assert [e4m3(x) for x in (448, 1e9, -1e9, np.inf, 2**-9, 2**-10, 1.0, -0.0)] == [
        0x7E, 0x7E, 0xFE, 0x7E, 0x01, 0x00, 0x38, 0x80]
    assert [e5m2(x) for x in (57344, 1e9, 2**-16, 2**-17, 1.0)] == [0x7B, 0x7B, 0x01, 0x00, 0x3C]
    assert e4m3(1.0625) == 0x38 and e4m3(1.1875) == 0x3A, "ties to even"


def test_bfloat16_rounds_to_even() -> None:
    def bits(value: int) -> int:
        return int(narrow(np.uint32([value]).view(np.float32), DataType.BFLOAT16).view("<u2")[0])

    assert [bits(x) for x in (0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF)] == [0x3F80, 0x3F82, 0x3F81, 0x7F80]


def test_numbers_win_over_nan() -> None:
    parts = [bytes_of(np.float32([np.nan, 1])), bytes_of(np.float32([2, np.nan]))]
    assert reduce(parts, DataType.FLOAT32, Reduction.MAX).view(np.float32).tolist() == [2, 1]


def test_scalars() -> None:
    assert scalar_bytes(0.25, DataType.BFLOAT16) == b"\x80\x3e" and is_integer(DataType.UINT64)


@pytest.mark.parametrize("kind", [DataType.FLOAT32, DataType.BFLOAT16, DataType.INT8, DataType.FLOAT8E4M3],
                         ids=lambda kind: kind.name)
@pytest.mark.parametrize("elements", [BLOCK, BLOCK + 3, 5 * BLOCK + 1, SHARED // 2 + 7])
def test_long_contributions_are_reduced_in_blocks(kind: DataType, elements: int) -> None:
    source = np.random.default_rng(elements)
    given = [source.integers(0, 256, elements * kind.size, np.uint8, False) for _ in range(3)]
    ends = (0, 1, BLOCK - 1, BLOCK, elements - 1)
    found = reduce(given, kind, Reduction.AVG).reshape(elements, kind.size)
    wanted = [reduce([part.reshape(elements, kind.size)[at] for part in given], kind, Reduction.AVG)
              for at in ends if at < elements]
    assert [found[at].tolist() for at in ends if at < elements] == [one.tolist() for one in wanted]


@pytest.mark.parametrize("size", [0, 5, (1 << 22) - 1, (1 << 22) + 7, 5 << 21])
def test_long_copies_are_whole(size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    out = np.zeros(size, np.uint8)
    copy(out, source)
    assert np.array_equal(out, source)


@pytest.mark.parametrize("kind", [DataType.BFLOAT16, DataType.FLOAT16])
@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.AVG, Reduction.PREMULSUM])
def test_compiled_sums_are_numpy_s(kind: DataType, reduction: Reduction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every code there is, infinities, the smallest and NaN among them; three ranks; lengths with a rest."""
    if not native.compiled(kind):
        pytest.skip(f"this processor has no instructions for {kind.name.lower()}")
    codes = np.arange(1 << 16, dtype="<u2")
    dice = np.random.default_rng(3)
    for elements in (1, 15, 16, 33, (1 << 16) + 5, 3 << 16):
        parts = [np.resize(dice.permutation(codes), elements).view(np.uint8) for _ in range(3)]
        factors = (0.5, -1.25, 3e-5) if reduction is Reduction.PREMULSUM else ()
        scalars = [scalar_bytes(value, kind) for value in factors]
        compiled = reduce(parts, kind, reduction, scalars)
        with monkeypatch.context() as patch:
            patch.setattr(native, "compiled", lambda kind: False)
            assert np.array_equal(compiled, reduce(parts, kind, reduction, scalars))


def test_without_a_compiler_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("no target")

    monkeypatch.setattr(native.jit, "compile_ir", fails)
    monkeypatch.setattr(native, "_compiled", native.jit.once(native._compile))
    one = narrow(np.array([1.5, 2.0], np.float32), DataType.BFLOAT16)
    assert not native.compiled(DataType.BFLOAT16)
    assert widen(reduce([one, one], DataType.BFLOAT16, Reduction.SUM), DataType.BFLOAT16).tolist() == [3.0, 4.0]
