"""torch.distributed with NCCL in several processes: every collective, messages, groups, DDP and FSDP2.

usage: torch_ranks.py RANKS [--copies | --captured]. It starts one process for each rank, as torchrun does; rank 0
prints. Results of two ranks do not depend on the order of sums. ``--copies``: collectives only, for devices without
PyTorch's kernels. ``--captured``: only collectives in a CUDA graph, among kernels.
"""

import os
import socket
import subprocess
import sys

if "RANK" not in os.environ:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = int(sys.argv[1])
    started = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], env={
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "NCCL_SOCKET_IFNAME": "lo"}) for rank in range(ranks)]
    raise SystemExit(max(abs(one.wait()) for one in started))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import digest, says  # noqa: E402

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ALONE = torch.cuda.device_count() < RANKS  # natively all ranks on one GPU, which NCCL takes for hosts of their own
if ALONE:
    os.environ["NCCL_HOSTID"] = f"host-{RANK}"
HERE = torch.device("cuda", 0 if ALONE else RANK)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def brought(shape, dtype=torch.float32, seed=0, rank=RANK):
    """What a rank brings."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 50, shape, generator=generator).to(dtype)


def show(label, *tensors):
    if RANK == 0:
        digest(label.replace(", ", "-").replace(" ", "-"), *tensors)


def collectives():
    for dtype in TYPES:
        found = [brought((257,), dtype, 1).to(HERE) for _ in OPS]
        for tensor, op in zip(found, OPS, strict=True):
            dist.all_reduce(tensor, op)
        show(f"all_reduce {dtype}", *found)
    tensor = brought((64,), seed=2).to(HERE)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    show("average", tensor)
    gathered = torch.empty(RANKS * 6, dtype=torch.bfloat16).to(HERE)
    dist.all_gather_into_tensor(gathered, brought((6,), torch.bfloat16, 3).to(HERE))
    assert torch.equal(gathered.cpu(), torch.cat([brought((6,), torch.bfloat16, 3, rank) for rank in range(RANKS)]))
    exchanged = torch.empty(RANKS * 5).to(HERE)
    dist.all_to_all_single(exchanged, brought((RANKS * 5,), seed=4).to(HERE))
    assert torch.equal(exchanged.cpu(), torch.cat([
        brought((RANKS * 5,), seed=4, rank=rank)[5 * RANK:5 * RANK + 5] for rank in range(RANKS)]))
    parts = [brought((7,), seed=5 + rank).to(HERE) for rank in range(RANKS)]
    part = torch.empty(7).to(HERE)
    dist.scatter(part, parts if RANK == 1 else None, src=1)
    assert torch.equal(part.cpu(), brought((7,), seed=5 + RANK, rank=1))
    whole = [torch.empty(7).to(HERE) for _ in range(RANKS)] if RANK == 0 else None
    dist.gather(part, whole, dst=0)
    dist.reduce(part, 0)
    show("gather, reduce", *(whole or ()), part)
    dist.broadcast(part, 0)
    scattered = [torch.empty(8).to(HERE) for _ in range(3)]
    with dist._coalescing_manager(device=HERE, async_ops=True) as together:
        for number, one in enumerate(scattered):
            dist.reduce_scatter_tensor(one, brought((RANKS * 8,), seed=50 + number).to(HERE))
    together.wait()
    show("reduce_scatter, coalesced", *scattered)


def messages_and_groups():
    received = torch.empty(9).to(HERE)
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, brought((9,), seed=9).to(HERE), (RANK + 1) % RANKS),
            dist.P2POp(dist.irecv, received, (RANK - 1) % RANKS)]):
        work.wait()
    assert torch.equal(received.cpu(), brought((9,), seed=9, rank=(RANK - 1) % RANKS))
    many = [brought((100,), seed=20 + number).to(HERE) for number in range(8)]
    for work in [dist.all_reduce(one, async_op=True) for one in many]:
        work.wait()
    group, stream = dist.new_group(list(range(RANKS))), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        aside = brought((33,), seed=60).to(HERE)
        dist.all_reduce(aside, group=group)
    large = brought((3 << 20,), seed=80).to(HERE)
    dist.all_reduce(large)
    stream.synchronize()
    show("asynchronous, two groups, 12 MiB", *many, aside, large)
    dist.destroy_process_group(group)


def training(kind):
    from models import small

    torch.manual_seed(2)
    torch.use_deterministic_algorithms(True)
    model = small(97).to(HERE)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        wrapped = model
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[HERE.index])
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for step in range(5):
        tokens = torch.randint(0, 97, (4, 17), generator=torch.Generator().manual_seed(step * RANKS + RANK)).to(HERE)
        loss = torch.nn.functional.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    whole = [one.full_tensor() if kind == "fsdp" else one for one in model.parameters()]
    show(f"{kind} parameters", *(one.detach() for one in whole))


def captured():
    weights, still = brought((64, 64), seed=70).to(HERE), torch.zeros(16, 64, device=HERE)

    def layer():
        product = still @ weights
        dist.all_reduce(product)
        pieces = torch.empty(RANKS * 16, 64, device=HERE)
        dist.all_gather_into_tensor(pieces, product * (RANK + 1))
        return product.relu(), pieces

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer()
    torch.cuda.current_stream().wait_stream(side)
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        made = layer()
    for step in range(6):
        still.copy_(brought((16, 64), seed=100 + step))
        graph.replay()
        found += [one.clone() for one in made]
    show("captured", *found)
    graph.reset()  # a communicator ends after what was captured of it


torch.cuda.set_device(HERE)
dist.init_process_group("nccl", device_id=HERE)
if "--captured" in sys.argv:
    captured()
else:
    collectives()
    messages_and_groups()
    if "--copies" not in sys.argv:
        training("ddp")
        training("fsdp")
dist.barrier()
dist.destroy_process_group()
if RANK == 0:
    says("ranks", RANKS)
