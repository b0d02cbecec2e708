"""Matrix products of 8192."""

import torch
from common import DEVICE, QUICK, chosen, counted, measured

n = 8192 if DEVICE == "cuda" else 256
for name, dtype, count in (("GEMM 8192, bf16", torch.bfloat16, 60), ("GEMM 8192, fp32", torch.float32, 8)):
    if chosen(name):
        a, b = (torch.randn(n, n, device=DEVICE, dtype=dtype) for _ in range(2))
        c = torch.empty_like(a)
        measured(name, "TFLOP/s", lambda a=a, b=b, c=c: torch.mm(a, b, out=c), max(4, count // (1 + QUICK)),
                 lambda s: 2 * n**3 / s / 1e12)
        counted(name, lambda a=a, b=b, c=c: torch.mm(a, b, out=c), 8)
