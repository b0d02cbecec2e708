"""Copies: pinned and pageable, both ways, non_blocking, strided, between dtypes, large and empty."""

from common import DEVICE, digest, says, torch_setup

torch = torch_setup()
sizes = (0, 1, 3, 4095, 65536, (1 << 20) + 7, 24 << 20)
for size in sizes:
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    pinned = source.pin_memory() if DEVICE == "cuda" else source.clone()
    one = source.to(DEVICE)
    two = pinned.to(DEVICE, non_blocking=True)
    three = torch.empty_like(two)
    three.copy_(two, non_blocking=True)
    back = torch.empty(size, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    back.copy_(three ^ 85, non_blocking=True)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    says(f"equal-{size}", bool((one == two).all()) and bool((back == (source ^ 85)).all()))
    digest(f"bytes-{size}", one.cpu(), two.cpu(), back)
# The source of a non-blocking copy changes right after: a pinned one is read in stream order, a pageable one at once.
pageable = torch.arange(1 << 20)
device = pageable.to(DEVICE, non_blocking=True)
pageable.zero_()
digest("pageable-reused", device)
matrix = torch.randn(513, 257, device=DEVICE)
digest("strided", matrix.t()[::3, ::2].cpu(), matrix[:, 5].cpu(), matrix.half().cpu(), matrix.to(torch.int32).cpu())
host = torch.zeros(257, 513)
host.t().copy_(matrix)
digest("strided-host", host)
big = torch.arange(1 << 24, dtype=torch.int64, device=DEVICE)
digest("big", big.cpu())
says("items", [big[i].item() for i in (0, 12345, -1)])
says("tolist", (matrix[:2, :2] > 0).tolist())
