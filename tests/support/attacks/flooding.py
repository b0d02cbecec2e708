"""A user's process that asks for as much as it can: `python -m … POOL KEY HOW PORT PUBLIC`; its input's end stops it.

``HOW``: ``polls`` (1,100 requests that wait for news), ``lists`` (messages of 15 MiB of empty lists, then of 4 MiB),
``pings`` (as fast as it can), ``imports`` (unfinished ones), ``deaf`` (asks and reads nothing). Prints
"begun" after its first round, and at its end what it was told, as JSON: {error or ok: times}.
"""

from __future__ import annotations

import json
import select
import sys
from collections import Counter
from pathlib import Path

import msgspec
import zmq

from rgpu.link.control.control_client import configure
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles

MIB = 1 << 20
encode = msgspec.msgpack.encode


def request(number: int, verb: str, args: dict[str, object]) -> bytes:
    """A message as clients write it."""
    return encode({"id": f"{number:x}", "verb": verb, "args": args, "leader": 0, "epoch": 0, "command": f"{number:x}"})


def lists(number: int, size: int, verb: str = "pool.ping") -> bytes:
    """A message whose arguments are so many bytes of empty lists."""
    head = request(number, verb, {})
    array = b"\xdd" + (size).to_bytes(4, "big") + b"\x90" * size
    return head.replace(b"\xa4args\x80", b"\xa4args\x81\xa4data" + array)


def messages(how: str, turn: int) -> list[bytes]:
    first = turn * 10000
    if how == "polls":
        return [request(first + n, "pool.events", {"since": 1 << 60, "wait": 60.0}) for n in range(1100)]
    if how == "lists":
        return [lists(first + n, 4 * MIB if turn % 2 else 15 * MIB, "image.import" if n % 3 else "pool.ping")
                for n in range(40)]
    if how == "imports":
        return [request(first + n, "image.import", {"id": f"{first + n:032x}", "offset": 0, "data": bytes(4 * MIB)})
                for n in range(20)]
    return [request(first + n, "pool.ping", {}) for n in range(500)]


def main() -> None:
    pool, key, how, address, public = sys.argv[1:]
    keys = KeyPair.load(PoolFiles(Path(pool)).key_path(key))
    context = zmq.Context()
    told: Counter[str] = Counter()
    turn = 0
    while not select.select([0], [], [], 0)[0]:
        socket = context.socket(zmq.DEALER)
        configure(socket, keys, Endpoint(address, public))
        socket.setsockopt(zmq.SNDHWM, 2000)
        socket.setsockopt(zmq.SNDTIMEO, 2000)
        socket.connect(address)
        try:
            for message in messages(how, turn):
                socket.send(message)
        except zmq.ZMQError:
            told["not sent"] += 1
        if turn == 0:
            print("begun", flush=True)
        turn += 1
        waits = 0
        while how != "deaf" and waits < (20 if how == "polls" else 2) and not select.select([0], [], [], 0)[0]:
            if socket.poll(500):
                answer = msgspec.msgpack.decode(socket.recv())
                told["ok" if answer.get("ok") else str(answer.get("error"))] += 1
            else:
                waits += 1
        socket.close(0)
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
