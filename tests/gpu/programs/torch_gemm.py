"""Large matrix products by cuBLAS(Lt): fp32, tf32, bf16, and fp8 through torch._scaled_mm."""

import sys

from common import DEVICE, digest, skip, torch_setup, value

torch = torch_setup(8)
kind = sys.argv[sys.argv.index("--dtype") + 1]
n = 8192 if DEVICE == "cuda" else 64
if kind == "fp8":
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        skip("fp8 needs compute capability 8.9")
    a = torch.randn(n, n, device=DEVICE).to(torch.float8_e4m3fn)
    b = torch.randn(n, n, device=DEVICE).to(torch.float8_e4m3fn).t()
    one = torch.tensor(1.0, device=DEVICE)
    for out in (torch.bfloat16, torch.float16):
        y = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=out)
        digest(str(out), y)
        value(f"sum-{out}", y.double().abs().mean().item(), 1e-3)
else:
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    a, b = (torch.randn(n, n, device=DEVICE, dtype=dtype) for _ in range(2))
    digest("product", a @ b)
    bias = torch.randn(n, device=DEVICE, dtype=dtype)
    y = torch.nn.functional.gelu(torch.addmm(bias, a, b))
    digest("epilogue", y)
    value("mean", y.double().abs().mean().item(), 1e-3)
    if kind == "fp32":
        torch.backends.cuda.matmul.allow_tf32 = True
        digest("tf32", a @ b)
    small = torch.randn(64, 96, 80, device=DEVICE, dtype=dtype)
    digest("batched", torch.bmm(small, small.transpose(1, 2)))
    for rows in (1, 7, 33):
        digest(f"thin-{rows}", a[:rows] @ b)
