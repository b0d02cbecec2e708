"""What the kernel family tests share: compile CUDA C++ by NVRTC, run it, compare exactly.

Runs on the PTX engine. With ``RGPU_FAMILIES_ON=cuda`` the same tests run on a real GPU through the
driver instead, which is how the references and the limits in these tests were checked.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

ON_GPU = os.environ.get("RGPU_FAMILIES_ON") == "cuda"
#: What the engine executes; a newer target is refused.
ARCH = "compute_75"
#: Bytes around each buffer that a kernel must leave alone.
GUARD = 256
GUARD_BYTE = 0xA5
THREADS = 2


class LaunchError(Exception):
    """A launch which ended with an error: CUDA's number, the address at fault."""

    def __init__(self, error: int, address: int = 0, detail: str = "") -> None:
        super().__init__(f"error {error} at {address:#x}: {detail}")
        self.error, self.address = error, address


# -- compiling ------------------------------------------------------------------------


@functools.cache
def compile_ptx(source: str, options: tuple[str, ...] = (), arch: str = ARCH) -> str:
    """PTX text of CUDA C++ ``source``."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    pathfinder = pytest.importorskip("cuda.pathfinder")
    include = pathfinder.find_nvidia_header_directory("cudart") or "/usr/local/cuda/include"
    flags = [f"--gpu-architecture={arch}", "--std=c++17", f"--include-path={include}", *options]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"family.cu", 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text.rstrip(b"\0 ").decode()


@functools.cache
def load(source: str, options: tuple[str, ...] = ()) -> Program:
    """The program of ``source``, shared by the tests that name it."""
    return new_program(source, options)


def new_program(source: str, options: tuple[str, ...] = ()) -> Program:
    """A program of its own, for a test which changes its globals."""
    return program_of(compile_ptx(source, options))


def program_of(ptx: str) -> Program:
    return GpuProgram(ptx) if ON_GPU else CpuProgram(ptx)


# -- running --------------------------------------------------------------------------


def layout(arguments: Sequence[np.generic | int]) -> tuple[bytes, list[int]]:
    """Parameters as a kernel gets them (an ``int`` is an address), and their offsets."""
    data, offsets = b"", []
    for argument in arguments:
        value = np.uint64(argument) if isinstance(argument, int) else argument
        align = value.dtype.alignment
        data += b"\0" * (-len(data) % align)
        offsets.append(len(data))
        data += value.tobytes()
    return data, offsets


def dims(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    full = (size,) if isinstance(size, int) else size
    return (*full, 1, 1)[:3]  # type: ignore[return-value]


class Program:
    """A loaded module. ``run`` gives each array to the kernel as a pointer and copies it back after."""

    def run(self, kernel: str, grid: int | tuple[int, ...], block: int | tuple[int, ...],
            *arguments: np.ndarray | np.generic, shared: int = 0) -> None:
        values: list[np.generic | int] = []
        buffers = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                assert argument.flags.c_contiguous and argument.flags.writeable
                buffers.append((argument, self.allocate(argument.nbytes)))
                self.write(buffers[-1][1], argument.tobytes())
                values.append(buffers[-1][1])
            else:
                values.append(argument)
        try:
            self.launch(kernel, dims(grid), dims(block), shared, values)
            for array, address in buffers:
                array[...] = np.frombuffer(self.read(address, array.nbytes), array.dtype).reshape(array.shape)
        finally:
            for array, address in buffers:
                self.free(address, array.nbytes)

    def map(self, kernel: str, *inputs: np.ndarray, out: Any, per: int = 1, block: int = 128) -> np.ndarray:
        """One thread for each element: ``k_kernel(in..., out, n)``; ``per`` results for each."""
        count = len(inputs[0])
        result = np.zeros((count, per) if per > 1 else count, out)
        arrays = [np.array(array) for array in inputs]
        self.run(f"k_{kernel}", -(-count // block), block, *arrays, result, np.int32(count))
        return result

    def set_global(self, name: str, value: np.ndarray) -> None:
        assert value.nbytes == self.global_size(name)
        self.write(self.global_address(name), value.tobytes())

    def get_global(self, name: str, dtype: Any) -> np.ndarray:
        return np.frombuffer(self.read(self.global_address(name), self.global_size(name)), dtype)

    def allocate(self, size: int) -> int:
        raise NotImplementedError

    def free(self, address: int, size: int) -> None:
        raise NotImplementedError

    def read(self, address: int, size: int) -> bytes:
        raise NotImplementedError

    def write(self, address: int, data: bytes) -> None:
        raise NotImplementedError

    def global_address(self, name: str) -> int:
        raise NotImplementedError

    def global_size(self, name: str) -> int:
        raise NotImplementedError

    def launch(self, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int,
               values: Sequence[np.generic | int]) -> None:
        raise NotImplementedError


class CpuProgram(Program):
    """On the PTX engine; device memory is this process's."""

    def __init__(self, ptx: str) -> None:
        from rgpu.server.device.cpu.ptx import MemoryRanges, parse_module

        self._ranges_of: Any = MemoryRanges
        self._maps: dict[int, mmap.mmap] = {}
        self._live: dict[int, int] = {}
        self.module: Any = parse_module(ptx, max_target=75)
        self._sizes = {name: info.size for name, info in self.module.globals.items()}
        self._globals = {name: self.allocate(size) for name, size in self._sizes.items()}
        for name, binary in self.module.initial_image(self._globals).items():
            self.write(self._globals[name], binary)
        self._linked: Any = self.module.link(self._globals)

    def allocate(self, size: int) -> int:
        area = mmap.mmap(-1, size + 2 * GUARD)
        area.write(bytes([GUARD_BYTE]) * GUARD + bytes(size) + bytes([GUARD_BYTE]) * GUARD)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area)) + GUARD
        self._maps[address] = area
        self._live[address] = size
        return address

    def free(self, address: int, size: int) -> None:
        del self._live[address]
        area = self._maps.pop(address)
        guard = bytes([GUARD_BYTE]) * GUARD
        assert area[:GUARD] == guard and area[GUARD + size:GUARD + size + GUARD] == guard, "a store outside the buffer"

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def global_address(self, name: str) -> int:
        return self._globals[name]

    def global_size(self, name: str) -> int:
        return self._sizes[name]

    def launch(self, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int,
               values: Sequence[np.generic | int]) -> None:
        params, offsets = layout(values)
        declared = self.module.kernels[kernel].params
        assert [info.offset for info in declared] == offsets, "the parameters' offsets differ"
        params = params.ljust(declared[-1].offset + declared[-1].size, b"\0") if declared else params
        ranges = self._ranges_of([(address, address + size) for address, size in sorted(self._live.items())])
        result = self._linked.launch(kernel, grid, block, shared, params, ranges, threads=THREADS)
        if result.error:
            raise LaunchError(result.error, result.address, result.detail)


class GpuProgram(Program):
    """On a real GPU, through the driver, which compiles the same PTX."""

    _context: Any = None

    def __init__(self, ptx: str) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        if GpuProgram._context is None:
            self._do(driver.cuInit(0))
            GpuProgram._context = self._do(driver.cuDevicePrimaryCtxRetain(self._do(driver.cuDeviceGet(0))))
        self._do(driver.cuCtxSetCurrent(GpuProgram._context))
        self._module = self._do(driver.cuModuleLoadData(ptx.encode() + b"\0"))

    def _do(self, answer: tuple[Any, ...]) -> Any:
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(int(answer[0]), 0, str(answer[0]))
        return answer[1] if len(answer) == 2 else answer[1:]

    def allocate(self, size: int) -> int:
        return int(self._do(self._driver.cuMemAlloc(max(size, 1))))

    def free(self, address: int, size: int) -> None:
        self._do(self._driver.cuMemFree(address))

    def read(self, address: int, size: int) -> bytes:
        data = bytearray(size)
        self._do(self._driver.cuMemcpyDtoH(data, address, size))
        return bytes(data)

    def write(self, address: int, data: bytes) -> None:
        self._do(self._driver.cuMemcpyHtoD(address, data, len(data)))

    def global_address(self, name: str) -> int:
        return int(self._do(self._driver.cuModuleGetGlobal(self._module, name.encode()))[0])

    def global_size(self, name: str) -> int:
        return int(self._do(self._driver.cuModuleGetGlobal(self._module, name.encode()))[1])

    def launch(self, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int,
               values: Sequence[np.generic | int]) -> None:
        function = self._do(self._driver.cuModuleGetFunction(self._module, kernel.encode()))
        cells = [ctypes.create_string_buffer(layout([value])[0]) for value in values]
        pointers = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(cell) for cell in cells])
        self._do(self._driver.cuLaunchKernel(function, *grid, *block, shared, 0, ctypes.addressof(pointers), 0))
        self._do(self._driver.cuCtxSynchronize())


# -- comparing ------------------------------------------------------------------------

_BITS = {2: np.int16, 4: np.int32, 8: np.int64}


def ordered(values: np.ndarray) -> np.ndarray:
    """Floats as integers in the floats' order, neighbours one apart, both zeros 0."""
    bits = np.ascontiguousarray(values).view(_BITS[values.dtype.itemsize]).astype(np.int64)
    low = np.iinfo(_BITS[values.dtype.itemsize]).min
    return np.where(bits < 0, np.int64(low) - bits, bits)


def ulp_distance(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Ulps between each result and the correctly rounded one: the measure of CUDA's tables.

    NaN against NaN is 0 and NaN against a number infinite, as is a zero of the wrong sign.
    """
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    distance = np.abs(ordered(actual).astype(np.float64) - ordered(expected).astype(np.float64))
    distance = np.where(np.abs(distance) < 2**52, np.abs(ordered(actual) - ordered(expected)), distance)
    nan = np.isnan(actual), np.isnan(expected)
    zeros = (actual == 0) & (expected == 0) & (np.signbit(actual) != np.signbit(expected))
    return np.where(nan[0] & nan[1], 0.0, np.where((nan[0] != nan[1]) | zeros, np.inf, distance))


def assert_ulp(actual: np.ndarray, expected: np.ndarray, limit: float | np.ndarray, inputs: Sequence[np.ndarray] = (),
               what: str = "") -> None:
    """Each result is within ``limit`` ulps; the message names the worst inputs."""
    distance = ulp_distance(actual, expected)
    bad = np.flatnonzero(~(distance <= limit))
    if not len(bad):
        return
    worst = bad[np.argsort(-distance[bad], kind="stable")][:8]
    lines = [f"{what}({', '.join(repr(array[i].item()) for array in inputs)}) = {actual[i]!r}, "
             f"expected {expected[i]!r}: {distance[i]:g} ulp" for i in worst]
    raise AssertionError(f"{len(bad)} of {len(actual)} beyond the limit:\n" + "\n".join(lines))


def assert_same(actual: np.ndarray, expected: np.ndarray, inputs: Sequence[np.ndarray] = (), what: str = "") -> None:
    """The same numbers: bits of floats too, but any NaN equals any NaN."""
    if actual.dtype.kind == "f":
        return assert_ulp(actual, expected, 0, inputs, what)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bad = np.flatnonzero(actual != expected)
    lines = [f"{what}({', '.join(repr(array[i].item()) for array in inputs)}) = {actual[i]!r}, "
             f"expected {expected[i]!r}" for i in bad[:8]]
    assert not len(bad), f"{len(bad)} of {len(actual)} differ:\n" + "\n".join(lines)


# -- exact rounding -------------------------------------------------------------------

#: Bits of precision, least exponent of a normal number, greatest exponent.
FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
MODES = ("rn", "rz", "ru", "rd")


def round_fraction(value: Fraction, form: str, mode: str = "rn", zero: float = 0.0) -> float:
    """``value`` correctly rounded; an exact zero becomes ``zero``."""
    if value == 0:
        return zero
    precision, least, greatest = FORMATS[form]
    sign = -1.0 if value < 0 else 1.0
    n, d = abs(value.numerator), value.denominator
    exponent = n.bit_length() - d.bit_length()
    if (n << max(-exponent, 0)) < (d << max(exponent, 0)):
        exponent -= 1
    quantum = max(exponent, least) - precision + 1
    whole, rest = divmod(n << max(-quantum, 0), d << max(quantum, 0))
    divisor = d << max(quantum, 0)
    away = {"rn": 2 * rest > divisor or (2 * rest == divisor and whole & 1), "rz": False,
            "ru": rest > 0 and sign > 0, "rd": rest > 0 and sign < 0}[mode]
    whole += bool(away)
    if whole.bit_length() + quantum - 1 > greatest:
        if mode == "rn" or (mode == "ru" and sign > 0) or (mode == "rd" and sign < 0):
            return sign * math.inf
        return sign * math.ldexp((1 << precision) - 1, greatest - precision + 1)
    return sign * math.ldexp(whole, quantum)


def sqrt_fraction(value: Fraction, bits: int = 80) -> Fraction:
    """A fraction on the same side of every float as the root of ``value``, and equal to it if that is one."""
    shift = 2 * (bits + max(0, (value.denominator.bit_length() - value.numerator.bit_length()) // 2 + 1))
    scaled, rest = divmod(value.numerator << shift, value.denominator)
    root = math.isqrt(scaled)
    sticky = root * root != scaled or rest != 0
    return Fraction(2 * root + sticky, 2 << (shift // 2))


def round_long(values: np.ndarray, form: str) -> np.ndarray:
    """Long doubles rounded to nearest even in another format; exact if the long double was."""
    precision, least, greatest = FORMATS[form]
    values = np.asarray(values, np.longdouble)
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(np.where(np.isfinite(values), values, 0))
        quantum = np.maximum(exponent - 1, least) - precision + 1
        rounded = np.ldexp(np.rint(np.ldexp(values, -quantum)), quantum)
        limit = np.ldexp(np.longdouble(2), greatest)
        return np.where(np.abs(rounded) >= limit, np.copysign(np.longdouble(np.inf), values), rounded)


# -- inputs ---------------------------------------------------------------------------


def specials(dtype: Any) -> np.ndarray:
    """Zeros, infinities, NaN, subnormals, the ends of the range, and neighbours of 1."""
    info = np.finfo(dtype)
    one = dtype(1)
    positive = [dtype(0), info.smallest_subnormal, info.smallest_normal - info.smallest_subnormal, info.smallest_normal,
                dtype(0.25), dtype(0.5), np.nextafter(one, dtype(0)), one, np.nextafter(one, dtype(2)), dtype(1.5),
                dtype(2), dtype(2.5), dtype(3), dtype(10), dtype(1 / info.eps), dtype(3 / info.eps), info.max,
                dtype(np.inf)]
    values = np.array(positive, dtype)
    return np.concatenate([values, -values, np.array([np.nan], dtype)])


def random_bits(dtype: Any, count: int, rng: np.random.Generator) -> np.ndarray:
    """Floats of every exponent: random bit patterns."""
    size = np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(count * size), dtype).copy()


def pairs(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Every special value with every other."""
    left, right = np.meshgrid(specials(dtype), specials(dtype))
    return left.ravel().copy(), right.ravel().copy()
