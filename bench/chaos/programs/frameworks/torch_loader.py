"""PyTorch: DataLoader workers (processes), pinned batches, copies that do not block.

usage: torch_loader.py STEPS SECONDS
"""

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
from common import Steps, last_of_burst, torch_setup

torch = torch_setup(4)


class Numbers(torch.utils.data.Dataset):
    """Rows that depend on their index alone."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):  # noqa: ANN204
        made = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=made), index % 10


def main() -> None:
    steps = Steps()
    loader = torch.utils.data.DataLoader(Numbers(32 * steps.count), batch_size=32, num_workers=2, pin_memory=True,
                                         shuffle=True, generator=torch.Generator().manual_seed(4), prefetch_factor=4)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 512), torch.nn.ReLU(),
                                torch.nn.Linear(512, 10)).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    given = iter(loader)
    for number in steps:
        rows, classes = next(given)
        rows, classes = rows.to("cuda", non_blocking=True), classes.to("cuda", non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(rows), classes)
        loss.backward()
        optimizer.step()
        if last_of_burst(number):
            steps.saw(loss)
    steps.end(*model.parameters())


if __name__ == "__main__":
    main()
