"""torch.compile: forward, backward and an optimizer; a mode; and without a driver known to the linker."""

import subprocess
import sys

from common import DEVICE, digest, note, says, torch_setup, value

torch = torch_setup()

if "--hide-driver" in sys.argv:  # what `ldconfig -p` shows on a machine without a driver
    true_output = subprocess.check_output

    def hidden(command, *arguments, **options):  # noqa: ANN001, ANN002, ANN003, ANN201
        if "ldconfig" in str(command[0] if isinstance(command, (list, tuple)) else command):
            return "" if options.get("text") or options.get("encoding") else b""
        return true_output(command, *arguments, **options)

    subprocess.check_output = hidden
    note("driver", "hidden from ldconfig")

mode = sys.argv[sys.argv.index("--mode") + 1] if "--mode" in sys.argv else "default"


def pointwise(x, y):  # noqa: ANN001, ANN201
    return torch.where(x > 0, x * y + 1, x - y) * 2


def network(x, w1, w2):  # noqa: ANN001, ANN201
    return (torch.nn.functional.gelu(x @ w1) @ w2).softmax(-1)


a, b = torch.randint(-8, 8, (1000, 77), device=DEVICE).float(), torch.randint(-8, 8, (1000, 77), device=DEVICE).float()
compiled = torch.compile(pointwise, mode=mode)
for _ in range(4):  # reduce-overhead warms up, records, then replays
    result = compiled(a, b).clone()
says("pointwise", bool((result == pointwise(a, b)).all()))
digest("pointwise", result)
w1 = torch.randn(64, 128, device=DEVICE, requires_grad=True)
w2 = torch.randn(128, 32, device=DEVICE, requires_grad=True)
x = torch.randn(256, 64, device=DEVICE)
fast = torch.compile(network, mode=mode)
optimizer = torch.optim.SGD([w1, w2], lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    loss = -(fast(x, w1, w2)[:, 0] + 1e-6).log().mean()
    loss.backward()
    optimizer.step()
value("loss", loss.detach().item(), 1e-4)
value("w1", w1.detach().double().abs().sum().item(), 1e-4)
value("w2", w2.detach().double().abs().sum().item(), 1e-4)
