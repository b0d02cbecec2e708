"""A tiled product with autotuning. Its inputs are small integers: every configuration gives the same bits."""

from common import digest, note, says, torch_setup

torch = torch_setup(22)
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

CONFIGS = [triton.Config({"M": m, "N": n, "K": k}, num_stages=s, num_warps=w)
           for m, n, k, s, w in ((64, 64, 32, 3, 4), (128, 64, 32, 4, 4), (128, 128, 64, 3, 8), (256, 128, 64, 4, 8))]


@triton.autotune(CONFIGS, key=["size"])
@triton.jit
def matmul(a, b, c, size, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # noqa: ANN001, ANN201, N803
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    depth = tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, size, K):
        left = tl.load(a + rows[:, None] * size + (start + depth)[None, :])
        right = tl.load(b + (start + depth)[:, None] * size + columns[None, :])
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * size + columns[None, :], total)


for size in (512, 2048):
    a, b = (torch.randint(-4, 5, (size, size), device="cuda").half() for _ in range(2))
    c = torch.empty(size, size, device="cuda")
    matmul[lambda meta, n=size: (triton.cdiv(n, meta["M"]), triton.cdiv(n, meta["N"]))](a, b, c, size)
    says(f"equal-{size}", bool((c == a.float() @ b.float()).all()))
    digest(str(size), c)
    note(f"best-{size}", matmul.best_config)
