"""Frames of the control link: a request, and what a node answers."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import zmq

from rgpu.link.control.control_server import Message, encode
from rgpu.link.keys import KeyPair, PoolFiles
from tests.support.control_node import Node


def control() -> dict[str, list[str]]:
    """A request with all fields, and what a node answers, frame by frame."""
    request = Message("1", "pool.ping", {"a": 1}, 5, 6, "c")
    told = {"request": [encode(request).hex()], "bare": [encode(Message("1", "pool.ping")).hex()]}
    with ExitStack() as stack:
        pool = PoolFiles(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "pool")
        pool.create()
        node = Node(pool)
        stack.callback(node.stop)
        keys = KeyPair.load(pool.key_path("user"))
        context = zmq.Context()
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.CURVE_SERVERKEY, node.endpoint.public.encode())
        sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        sock.setsockopt(zmq.RCVTIMEO, 20000)
        sock.connect(node.endpoint.address)
        for verb, count in (("pool.ping", 1), ("session.kill", 1), ("session.migrate", 5)):
            sock.send(encode(Message("7", verb, {}, 2, 3, "")))
            told[verb] = [sock.recv().hex() for _ in range(count)]
        sock.close(0)
        context.destroy(linger=0)
    return told
