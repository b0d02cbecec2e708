"""torch.multiprocessing: processes share tensors on the GPU (cuIpc handles and events), both ways.

A producer sends tensors of the caching allocator, views of one of them among them; each consumer adds to them in place,
brings a tensor of its own, and the producer computes with what came back.
"""

import torch
import torch.multiprocessing as multiprocessing
from common import DEVICE, digest, says

ROUNDS, CONSUMERS = 6, 2


def consume(number, taken, given):
    """Add to each tensor that comes, in place; send one of this process's own."""
    kept = []
    for step in range(ROUNDS):
        whole, part, index = taken.get()
        part.add_(step + number)
        own = whole[: 1 << 10].double().cumsum(0) * (number + 1)
        torch.cuda.synchronize()
        kept.append(own)  # its producer keeps a tensor until its consumers have let go of it
        given.put((index, own))
    assert taken.get() is None


def main():
    multiprocessing.set_start_method("spawn")
    taken = [multiprocessing.Queue() for _ in range(CONSUMERS)]
    given = multiprocessing.Queue()
    workers = [multiprocessing.Process(target=consume, args=(number, taken[number], given))
               for number in range(CONSUMERS)]
    for worker in workers:
        worker.start()
    tensors = [torch.arange(1 << 16, dtype=torch.float32, device=DEVICE) * (number + 1) for number in range(CONSUMERS)]
    total = torch.zeros(1 << 10, dtype=torch.float64, device=DEVICE)
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        for number in range(CONSUMERS):
            taken[number].put((tensors[number], tensors[number][256:1024], number))
        came = dict(given.get() for _ in range(CONSUMERS))
        for number in range(CONSUMERS):  # in one order, whoever was first
            total += came[number]
        del came
    digest("sums", total)
    digest("shared", *tensors)
    for queue in taken:
        queue.put(None)
    for worker in workers:
        worker.join()
    says("ended", [worker.exitcode for worker in workers])


if __name__ == "__main__":
    main()
