"""NCCL: torch.distributed with one process (--world), or one process over two GPUs."""

import os
import sys

from common import digest, says, skip, torch_setup

torch = torch_setup(13)
if "--world" in sys.argv:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))
    x = torch.randn(100_000, device="cuda")
    torch.distributed.all_reduce(x)
    torch.distributed.broadcast(x, 0)
    parts = [torch.empty_like(x)]
    torch.distributed.all_gather(parts, x)
    digest("collectives", x, parts[0])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[0])
    model(x[:640].view(10, 64)).square().mean().backward()
    digest("gradient", model.module.weight.grad)
    torch.distributed.destroy_process_group()
else:
    if torch.cuda.device_count() < 2:
        skip("one GPU only")
    import torch.cuda.nccl as nccl
    from torch.nn.parallel import comm

    tensors = [torch.randint(0, 100, (1 << 20,), device=f"cuda:{i}").float() for i in range(2)]
    expected = sum(t.cpu() for t in tensors)
    nccl.all_reduce(tensors)
    says("all_reduce", all(bool((t.cpu() == expected).all()) for t in tensors))
    digest("all_reduce", *tensors)
    digest("peer", tensors[0].to("cuda:1") + tensors[1])
    digest("broadcast", *comm.broadcast(tensors[0], [0, 1]))
    model = torch.nn.DataParallel(torch.nn.Linear(128, 8).cuda(), [0, 1])
    y = model(torch.randn(64, 128, device="cuda"))
    y.square().mean().backward()
    digest("data_parallel", y, model.module.weight.grad)
