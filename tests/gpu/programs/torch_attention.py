"""scaled_dot_product_attention with every backend that accepts the problem, forward and backward."""

import warnings

from common import DEVICE, digest, first_line, note, torch_setup

torch = torch_setup()
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

warnings.simplefilter("ignore")
ran = 0
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for causal in (False, True):
        q, k, v = (torch.randn(2, 4, 256, 64, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
        for name in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
            label = f"{name}-{str(dtype).split('.')[1]}-{'causal' if causal else 'full'}"
            for x in (q, k, v):
                x.grad = None
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
                # Some backward passes have no deterministic form; with integers in the gradient's place they would
                # still round, so only the forward result is compared for them.
                digest(label, y)
                ran += 1
                y.float().square().mean().backward()
                digest(f"{label}-grad", q.grad)
            except (RuntimeError, NotImplementedError) as error:
                note(label, first_line(error)[:120])
digest("ran", str(ran).encode())
