"""Generators: Philox states, distributions, multinomial, dropout; states taken and put back."""

from common import DEVICE, digest, says, torch_setup

torch = torch_setup(11, deterministic=False)  # multinomial has no algorithm that is called so; its result is the same
cuda = DEVICE == "cuda"
state = torch.cuda.get_rng_state() if cuda else torch.get_rng_state()
digest("state", state)
first = torch.rand(10007, device=DEVICE)
digest("uniform", first)
digest("normal", torch.randn(5001, device=DEVICE, dtype=torch.float64), torch.randn(77, 3, device=DEVICE).half())
digest("integers", torch.randint(-1000, 1000, (4097,), device=DEVICE), torch.randperm(5000, device=DEVICE))
digest("multinomial", torch.multinomial(first[:500], 200), torch.multinomial(first[:500], 900, replacement=True))
digest("dropout", torch.nn.functional.dropout(torch.ones(100, 1000, device=DEVICE), 0.3))
digest("bernoulli", torch.bernoulli(first), torch.empty(3000, device=DEVICE).exponential_(2.0))
digest("others", torch.empty(3000, device=DEVICE).cauchy_(), torch.poisson(first * 10))
(torch.cuda.set_rng_state if cuda else torch.set_rng_state)(state)
says("again", bool((torch.rand(10007, device=DEVICE) == first).all()))
own = torch.Generator(DEVICE).manual_seed(99)
digest("generator", torch.rand(100, device=DEVICE, generator=own), own.get_state())
if cuda:
    with torch.random.fork_rng(devices=[0]):
        torch.rand(1000, device=DEVICE)
    graph, static = torch.cuda.CUDAGraph(), torch.empty(1000, device=DEVICE)
    with torch.cuda.graph(graph):
        static.copy_(torch.rand(1000, device=DEVICE))
    for turn in range(3):
        graph.replay()
        digest(f"graph-{turn}", static)
