"""Vector addition; masks, several dtypes, a kernel compiled anew for each constant."""

from common import digest, says, torch_setup

torch = torch_setup(20)
import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def add(x, y, out, n, SIZE: tl.constexpr):  # noqa: ANN001, ANN201, N803
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


for dtype in (torch.float32, torch.float16, torch.int64):
    for size in (128, 1024):
        x, y = (torch.randint(-100, 100, (98432,), device="cuda").to(dtype) for _ in range(2))
        out = torch.empty_like(x)
        add[(triton.cdiv(x.numel(), size),)](x, y, out, x.numel(), SIZE=size)
        says(f"{dtype}-{size}", bool((out == x + y).all()))
        digest(f"{str(dtype)}-{size}", out)
