"""Module globals, __constant__ memory, the heap, modules loaded and unloaded in between. usage: modules.py FOLDER

The host keeps a model of every variable; all are read back and compared at every step.
"""

import ctypes
import hashlib
import random

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

SOURCE = b"""
__device__ unsigned counter[%(n)d] = {11, 22, 33};
__constant__ unsigned factor[%(n)d] = {5, 6, 7};
__device__ unsigned long long only_%(k)d = %(k)dULL << 33;
extern "C" __global__ void step(unsigned* out) {
    int i = threadIdx.x;
    counter[i] = counter[i] * factor[i] + %(k)du;
    if (i == 0) only_%(k)d += counter[0];
    out[i] ^= counter[i];
}
"""

#: Blocks of the heap that live on from launch to launch, found and filled through pointers of the module's own.
HEAP = b"""
__device__ __noinline__ unsigned twice(unsigned x) { return 2 * x; }
__device__ __noinline__ unsigned thrice(unsigned x) { return 3 * x; }
__device__ unsigned (*const by[2])(unsigned) = {twice, thrice};
__device__ unsigned* kept[64];
extern "C" __global__ void grow(unsigned* out, unsigned n) {
    int i = threadIdx.x;
    unsigned* more = static_cast<unsigned*>(malloc(4 * (n + 1)));
    if (!more) __trap();
    for (unsigned k = 0; k < n; k++) more[k] = kept[i][k];
    more[n] = by[(n + i) % 2](n * 64 + i);
    free(kept[i]);
    kept[i] = more;
    out[i] = 0;
    for (unsigned k = 0; k <= n; k++) out[i] = out[i] * 31 + more[k];
}
"""


class Growing:
    """Blocks of the heap that are copied into larger ones; each word is held against a model."""

    def __init__(self) -> None:
        _, self.grow = kernels(HEAP, "grow")
        self.out = int(check(driver.cuMemAlloc(256)))
        self.words: list[np.ndarray] = []

    def run(self) -> None:
        n, lanes = len(self.words), np.arange(64, dtype=np.uint32)
        check(driver.cuLaunchKernel(self.grow, 1, 1, 1, 64, 1, 1, 0, 0,
                                    ((self.out, n), (ctypes.c_void_p, ctypes.c_uint)), 0))
        self.words.append((n * 64 + lanes) * np.where((n + lanes) % 2, np.uint32(3), np.uint32(2)))
        wanted, got = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
        for word in self.words:
            wanted = wanted * np.uint32(31) + word
        check(driver.cuMemcpyDtoH(got.ctypes.data, self.out, got.nbytes))
        assert np.array_equal(got, wanted), ("heap", n)


class Loaded:
    """A module and what its variables hold."""

    def __init__(self, number: int) -> None:
        self.number, self.n = number, 32 + 16 * (number % 3)
        self.module, self.step = kernels(SOURCE % {b"n": self.n, b"k": number}, "step")
        self.counter = np.zeros(self.n, np.uint32)
        self.factor = np.zeros(self.n, np.uint32)
        self.counter[:3], self.factor[:3] = (11, 22, 33), (5, 6, 7)
        self.only = number << 33
        self.at = {name: check(driver.cuModuleGetGlobal(self.module, name.encode()))
                   for name in ("counter", "factor", f"only_{number}")}

    def set_factor(self, values: np.ndarray) -> None:
        self.factor = values
        check(driver.cuMemcpyHtoD(self.at["factor"][0], values.ctypes.data, values.nbytes))

    def run(self) -> None:
        check(driver.cuLaunchKernel(self.step, 1, 1, 1, self.n, 1, 1, 0, 0, ((out,), (ctypes.c_void_p,)), 0))
        with np.errstate(over="ignore"):
            self.counter = self.counter * self.factor + np.uint32(self.number)
        self.only += int(self.counter[0])
        model[:self.n] ^= self.counter

    def verify(self) -> None:
        for name, wanted in (("counter", self.counter), ("factor", self.factor),
                             (f"only_{self.number}", np.array([self.only], np.uint64))):
            pointer, size = self.at[name]
            assert size == wanted.nbytes, (name, size)
            again, _ = check(driver.cuModuleGetGlobal(self.module, name.encode()))
            assert int(again) == int(pointer), "a global has moved"
            got = np.zeros_like(wanted)
            check(driver.cuMemcpyDtoH(got.ctypes.data, pointer, size))
            assert np.array_equal(got, wanted), (self.number, name)


start()
out = int(check(driver.cuMemAlloc(1024)))
check(driver.cuMemsetD8(out, 0, 1024))
model = np.zeros(256, np.uint32)
chance, loaded, made = random.Random(7), [], 0
growing = Growing()
for number in range(24):
    if len(loaded) < 2 or (chance.random() < 0.5 and len(loaded) < 5):
        made += 1
        loaded.append(Loaded(made))
    elif chance.random() < 0.6:
        check(driver.cuModuleUnload(loaded.pop(chance.randrange(len(loaded))).module))
    for module in loaded:
        if chance.random() < 0.5:
            module.set_factor(np.array([chance.randrange(1 << 32) | 1 for _ in range(module.n)], np.uint32))
        module.run()
    growing.run()
    if number in (7, 12, 17):
        gate(number)
    for module in loaded:
        module.verify()
got = np.zeros_like(model)
check(driver.cuMemcpyDtoH(got.ctypes.data, out, got.nbytes))
assert np.array_equal(got, model)
print("modules", made, "alive", len(loaded))
print("digest", hashlib.sha256(got.tobytes()).hexdigest())
