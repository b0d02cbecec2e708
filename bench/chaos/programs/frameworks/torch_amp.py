"""PyTorch: a CNN trained with mixed precision and GradScaler, whose steps depend on what the GPU found.

usage: torch_amp.py STEPS SECONDS
"""

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
from common import Steps, last_of_burst, torch_setup

torch = torch_setup(5)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3, padding=1, stride=2), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
    torch.nn.Conv2d(32, 64, 3, padding=1, stride=2), torch.nn.BatchNorm2d(64), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(64 * 64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1),
    torch.nn.Linear(128, 10)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
# The scale grows until a gradient overflows, so that steps are skipped, too.
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14, growth_interval=20)
images = [torch.randn(64, 3, 32, 32).pin_memory() for _ in range(4)]
classes = torch.randint(0, 10, (64,)).to("cuda")
steps = Steps()
for number in steps:
    batch = images[number % 4].to("cuda", non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.float16):
        loss = torch.nn.functional.cross_entropy(model(batch), classes)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if last_of_burst(number):
        steps.saw(loss, scaler.get_scale())
steps.end(*model.state_dict().values())
