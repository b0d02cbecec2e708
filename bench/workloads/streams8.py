#!/usr/bin/env python3
"""Eight busy streams that know nothing of each other: matrix products on each in turn, a wait each WAIT rounds.

    python streams8.py --rounds 400

Ends with `digest HEX` of all results. For `bench/checkpoint/catch_up.py`: the most that an order of issue may cost.
"""

from __future__ import annotations

import argparse
import hashlib

import torch

STREAMS, WAIT = 8, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--size", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(3)
    factor = torch.nn.init.orthogonal_(torch.empty(options.size, options.size)).to("cuda")
    values = [torch.randn(options.size, options.size).to("cuda") for _ in range(STREAMS)]
    spare = [torch.empty_like(value) for value in values]
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    torch.cuda.synchronize()
    for number in range(options.rounds):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.mm(values[index], factor, out=spare[index])
                values[index], spare[index] = spare[index], values[index]
        if number % WAIT == WAIT - 1:
            torch.cuda.synchronize()
            print(f"round {number + 1}", flush=True)
    torch.cuda.synchronize()
    print("digest", hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in values)).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
