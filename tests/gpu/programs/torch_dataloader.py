"""DataLoader workers, forked or spawned, with pinned memory and copies that do not block."""

import sys

import torch
from common import DEVICE, digest, says


class Numbers(torch.utils.data.Dataset):
    """Rows that depend on their index alone."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index)), index


def main(start: str) -> None:
    torch.manual_seed(3)
    weights = torch.randn(768, 64, device=DEVICE)  # the driver is up before the workers are made
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=32, num_workers=3, shuffle=True,
                                         pin_memory=DEVICE == "cuda", multiprocessing_context=start,
                                         persistent_workers=True, generator=torch.Generator().manual_seed(4))
    sums, seen = [], []
    for _ in range(2):
        for rows, index in loader:
            rows = rows.to(DEVICE, non_blocking=True)
            sums.append((rows.flatten(1) @ weights).relu().sum(1).cpu())
            seen.append(index)
    says("pinned", bool(loader.pin_memory) == (DEVICE == "cuda"))
    digest("order", *seen)
    digest("results", *sums)


if __name__ == "__main__":
    main(sys.argv[sys.argv.index("--start") + 1] if "--start" in sys.argv else "fork")
