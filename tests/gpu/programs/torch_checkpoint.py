"""Model, optimizer and generator are saved and loaded; training goes on as if it had not stopped."""

import io
import tempfile

from common import DEVICE, digest, says, torch_setup

torch = torch_setup()
from models import Cnn, cnn_batch  # noqa: E402

images, classes = (part.to(DEVICE) for part in cnn_batch(32))


def train(model, optimizer, steps):  # noqa: ANN001, ANN201
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()


def rng():  # noqa: ANN201
    return torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


model = Cnn().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train(model, optimizer, 10)
with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng()}, file.name)
    saved = torch.load(file.name, map_location="cpu")
train(model, optimizer, 10)
other = Cnn().to(DEVICE)
other.load_state_dict(saved["model"])
again = torch.optim.AdamW(other.parameters(), lr=1e-3)
again.load_state_dict(saved["optimizer"])
(torch.cuda.set_rng_state if DEVICE == "cuda" else torch.set_rng_state)(saved["rng"])
train(other, again, 10)
says("goes_on", all(bool((x == y).all()) for x, y in zip(model.state_dict().values(), other.state_dict().values(),
                                                         strict=True)))
digest("weights", *model.state_dict().values())
memory = io.BytesIO()
torch.save(model.state_dict(), memory)
memory.seek(0)
direct = torch.load(memory, map_location=DEVICE)
digest("direct", *direct.values())
