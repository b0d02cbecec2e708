"""Training steps under torch.profiler, or without: the results are the same, it names operators and the GPU's work."""

import sys
from collections import Counter

from common import DEVICE, digest, note, says, torch_setup

torch = torch_setup()
from models import Cnn, cnn_batch  # noqa: E402

model = Cnn().to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
images, classes = (part.to(DEVICE) for part in cnn_batch(32))


def steps(count):  # noqa: ANN001, ANN201
    for _ in range(count):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()


if "on" in sys.argv:
    with torch.profiler.profile(record_shapes=True) as profiler:
        steps(5)
    table = profiler.key_averages()
    says("names_operators", any("convolution" in row.key for row in table))
    work = Counter(event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    says("kernels_copies_memsets", sorted(work.items()))
    note("device_time_us", sum(getattr(row, "self_device_time_total", 0) for row in table))
else:
    steps(5)
steps(5)
if DEVICE == "cuda":
    torch.cuda.nvtx.range_push("range")
    torch.cuda.nvtx.range_pop()
digest("weights", *model.state_dict().values())
