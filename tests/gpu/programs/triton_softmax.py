"""A fused softmax over rows: reductions across warps."""

from common import digest, says, torch_setup

torch = torch_setup(21)
import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def softmax(x, out, stride, columns, SIZE: tl.constexpr):  # noqa: ANN001, ANN201, N803
    row = tl.program_id(0)
    at = tl.arange(0, SIZE)
    values = tl.load(x + row * stride + at, mask=at < columns, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * stride + at, powers / tl.sum(powers, 0), mask=at < columns)


for columns, warps in ((100, 1), (1823, 4), (5000, 8), (16000, 16)):
    x = torch.randn(257, columns, device="cuda")
    out = torch.empty_like(x)
    softmax[(257,)](x, out, x.stride(0), columns, SIZE=triton.next_power_of_2(columns), num_warps=warps)
    says(f"close-{columns}", bool(torch.allclose(out, x.softmax(1), atol=1e-6)))
    digest(str(columns), out)
