"""A CNN trained with mixed precision and GradScaler."""

import sys

from common import DEVICE, digest, note, torch_setup

torch = torch_setup()
from models import Cnn, cnn_batch  # noqa: E402

steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 60
model = Cnn().to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler(DEVICE, enabled=DEVICE == "cuda")
images, classes = (part.to(DEVICE) for part in cnn_batch())
losses = torch.zeros(steps, device=DEVICE)
for step in range(steps):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(DEVICE, torch.float16 if DEVICE == "cuda" else torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(images), classes)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses[step] = loss.detach()
digest("losses", losses)
digest("weights", *model.state_dict().values())
note("last_loss", losses[-1].item())
note("scale", scaler.get_scale())
