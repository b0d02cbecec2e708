"""FFT with plans, real and complex, one to three dimensions."""

import cupy as cp
from common import digest, says

state = cp.random.RandomState(2)
for shape in ((4096,), (16, 1009), (64, 96), (12, 20, 30)):
    x = state.standard_normal(shape)
    y = cp.fft.rfftn(x)
    name = "x".join(map(str, shape))
    digest(name, y)
    says(f"back-{name}", bool(cp.allclose(cp.fft.irfftn(y, s=shape), x)))
z = state.standard_normal((8, 512)).astype(cp.complex64)
digest("single", cp.fft.fft(z), cp.fft.ifft(z, axis=0), cp.fft.fftshift(z))
