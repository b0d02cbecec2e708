"""The shape of GPT-2 124M in plain PyTorch: training in fp32 or bf16, or generation in bf16 with a cache."""

import sys

from common import DEVICE, digest, note, torch_setup, value

torch = torch_setup(5)
from models import gpt2  # noqa: E402

model = gpt2().to(DEVICE)
made = torch.Generator().manual_seed(6)
if "--generate" in sys.argv:
    model = model.to(torch.bfloat16).eval()
    prompt = torch.randint(0, model.tokens, (1, 32), generator=made).to(DEVICE)
    tokens = model.generate(prompt, 96 if DEVICE == "cuda" else 8)
    digest("tokens", tokens)
    note("first", tokens[0, :8].tolist())
else:
    bf16 = sys.argv[sys.argv.index("--dtype") + 1] == "bf16"
    batch, length, steps = (8, 512, 8) if DEVICE == "cuda" else (2, 16, 3)
    tokens = torch.randint(0, model.tokens, (batch, length + 1), generator=made).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=DEVICE == "cuda")
    losses = []
    # The gradients of embedding and attention add up in no fixed order unless deterministic algorithms are asked for.
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    digest("losses", torch.stack(losses))
    value("last_loss", losses[-1].item(), 1e-3)
    digest("weights", *model.state_dict().values())
