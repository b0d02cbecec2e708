"""Copies of 1 and 256 MiB of random bytes, pinned and pageable, both ways, each awaited; and such as go on behind."""

import torch
from common import DEVICE, QUICK, chosen, measured

for mib in (1, 256):
    size = mib << 20
    there = torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE)
    pageable = there.cpu()
    pinned = pageable.pin_memory() if DEVICE == "cuda" else pageable.clone()
    count = (50 if QUICK else 100) if mib == 1 else 1
    for kind, host in (("pinned", pinned), ("pageable", pageable)):
        for way, target, source in (("to device", there, host), ("from device", host, there)):
            name = f"{way}, {mib} MiB, {kind}"
            if not chosen("copies") and not chosen(name):
                continue

            def waited(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target.copy_(source, non_blocking=True)
                if DEVICE == "cuda":
                    torch.cuda.current_stream().synchronize()

            measured(name, "GB/s", waited, count, lambda s, size=size: size / s / 1e9)
    assert bool((pinned == pageable).all()) and bool((there.cpu() == pageable).all())

if DEVICE == "cuda" and chosen("behind work"):
    AHEAD, SIZE = 12, 4 << 20
    layers = [torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device=DEVICE) for _ in range(AHEAD)]
    kept = [torch.empty(SIZE, dtype=torch.uint8, pin_memory=True) for _ in range(AHEAD)]
    left, right = (torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    side = torch.cuda.Stream()

    def step(copies: bool) -> None:
        """Work of a layer each, and its copy to the host on another stream, as programs that offload have it."""
        for layer, place in zip(layers, kept, strict=True):
            layer.add_(1)
            for _ in range(4):
                torch.mm(left, right)
            if copies:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    place.copy_(layer, non_blocking=True)
                torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    for name, copies in (("behind work, 12 x 4 MiB from device", True), ("behind work, nothing", False)):
        measured(name, "ms", lambda copies=copies: step(copies), 3, lambda s: s * 1e3)
    step(True)
    assert all(bool((place == layer.cpu()).all()) for layer, place in zip(layers, kept, strict=True))
