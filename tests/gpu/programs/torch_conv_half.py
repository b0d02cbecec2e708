"""Convolutions in half precision and bfloat16, channels last, grouped, transposed, 3D; forward and backward."""

from common import DEVICE, digest, torch_setup

torch = torch_setup(10)
f = torch.nn.functional
for dtype in (torch.float16, torch.bfloat16):
    name = str(dtype).split(".")[1]
    x = torch.randn(8, 32, 56, 56, device=DEVICE, dtype=dtype, requires_grad=True)
    w = torch.randn(64, 32, 3, 3, device=DEVICE, dtype=dtype, requires_grad=True)
    y = f.conv2d(x, w, padding=1)
    y.float().square().mean().backward()
    digest(f"{name}-plain", y, x.grad, w.grad)
    last = f.conv2d(x.detach().to(memory_format=torch.channels_last), w.detach().to(memory_format=torch.channels_last))
    digest(f"{name}-channels-last", last)
    digest(f"{name}-grouped", f.conv2d(x, torch.randn(32, 1, 5, 5, device=DEVICE, dtype=dtype), groups=32))
    digest(f"{name}-transposed", f.conv_transpose2d(x, torch.randn(32, 16, 2, 2, device=DEVICE, dtype=dtype),
                                                    stride=2))
    digest(f"{name}-3d", f.conv3d(torch.randn(2, 4, 8, 16, 16, device=DEVICE, dtype=dtype),
                                  torch.randn(8, 4, 3, 3, 3, device=DEVICE, dtype=dtype)))
