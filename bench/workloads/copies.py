"""Copies of 1 and 256 MiB of random bytes, pinned and pageable, both ways, each awaited."""

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
