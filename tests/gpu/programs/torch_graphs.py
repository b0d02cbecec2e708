"""CUDA graphs: capture by hand, a captured training step, make_graphed_callables, capture errors."""

from common import digest, first_line, says, torch_setup

torch = torch_setup(12)
from models import Cnn, cnn_batch  # noqa: E402

static = torch.zeros(4096, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = (static * 2 + 1).sin().sort().values
for turn in range(5):
    static.fill_(turn)
    graph.replay()
    digest(f"replay-{turn}", out)

model = Cnn().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images, classes = (part.cuda() for part in cnn_batch(32))


def step():  # noqa: ANN201
    optimizer.zero_grad(set_to_none=False)
    loss = torch.nn.functional.cross_entropy(model(images), classes)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
training = torch.cuda.CUDAGraph()
with torch.cuda.graph(training):
    loss = step()
for turn in range(10):
    images.copy_(cnn_batch(32, seed=turn)[0])
    training.replay()
digest("trained", loss, *model.state_dict().values())

layer = torch.nn.Linear(64, 64).cuda()
sample = torch.randn(16, 64, device="cuda", requires_grad=True)
graphed = torch.cuda.make_graphed_callables(layer, (sample,))
y = graphed(torch.randn(16, 64, device="cuda", requires_grad=True))
y.sum().backward()
digest("graphed", y, layer.weight.grad)
says("capturing", torch.cuda.is_current_stream_capturing())
bad = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(bad):
        static.add_(1)
        static.sum().item()  # a wait while capturing
    says("capture_error", "none")
except RuntimeError as error:
    says("capture_error", first_line(error))
torch.cuda.synchronize()
digest("after", static + 1)
