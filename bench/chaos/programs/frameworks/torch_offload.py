"""PyTorch: gradients go to pinned memory beside the backward pass, the CPU updates the weights, and sends them back.

usage: torch_offload.py STEPS SECONDS
"""

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
from common import Steps, last_of_burst, torch_setup

torch = torch_setup(7)
torch.set_num_threads(1)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers).to("cuda")
weights = list(model.parameters())
masters = [weight.detach().cpu().pin_memory() for weight in weights]
moments = [torch.zeros_like(master) for master in masters]
grads = [torch.empty(weight.shape, pin_memory=True) for weight in weights]
events = [torch.cuda.Event() for _ in weights]
side = torch.cuda.Stream()


def leaves(index):
    """A hook: the gradient is there, and its copy to the host begins beside what is still to be calculated."""
    def copy(weight):
        side.wait_stream(torch.cuda.current_stream())
        weight.grad.record_stream(side)
        with torch.cuda.stream(side):
            grads[index].copy_(weight.grad, non_blocking=True)
            events[index].record(side)
    return copy


for index, weight in enumerate(weights):
    weight.register_post_accumulate_grad_hook(leaves(index))
inputs = [torch.randn(128, 256).pin_memory() for _ in range(4)]
steps = Steps()
for number in steps:
    batch = inputs[number % 4].to("cuda", non_blocking=True)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    with torch.no_grad():
        for weight, master, moment, grad, event in zip(weights, masters, moments, grads, events, strict=True):
            event.synchronize()
            moment.mul_(0.9).add_(grad)
            master.sub_(moment, alpha=0.05)
            weight.copy_(master, non_blocking=True)
            weight.grad = None
    torch.cuda.current_stream().wait_stream(side)
    if last_of_burst(number):
        steps.saw(loss)
        torch.cuda.synchronize()
steps.end(*masters, *model.state_dict().values())
