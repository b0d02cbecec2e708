"""A process without a key that opens connections to ports and keeps them: `python -m … COUNT SAYS PORT…`.

``SAYS``: nothing, a part of the protocol's beginning, or garbage. What is closed is opened again, 1,000 a second at
most. Prints a line once so many were opened, and when its input ends the number in all.
"""

from __future__ import annotations

import resource
import select
import socket
import sys
import time

AGAIN = 1000  #: connections a second, once all were opened
SAYS = {"nothing": b"", "signature": b"\xff" + bytes(8) + b"\x7f", "head": b"RGPL", "garbage": bytes(range(200)) * 5}


def main() -> None:
    count, says, ports = int(sys.argv[1]), SAYS[sys.argv[2]], [int(port) for port in sys.argv[3:]]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept: list[socket.socket] = []
    made, began = 0, 0.0
    while not select.select([0], [], [], 0)[0]:
        while len(kept) < count and (made < count or made - count < AGAIN * (time.monotonic() - began)):
            sock = socket.socket()
            sock.settimeout(5)
            try:
                sock.connect(("127.0.0.1", ports[made % len(ports)]))
                sock.send(says)
            except OSError:
                sock.close()
                time.sleep(0.001)
                continue
            sock.setblocking(False)
            kept.append(sock)
            made += 1
            if made == count:
                began = time.monotonic()
                print("open", flush=True)
        alive = []
        for sock in kept:
            try:
                if sock.recv(4096):
                    alive.append(sock)
                else:
                    sock.close()
            except BlockingIOError:
                alive.append(sock)
            except OSError:
                sock.close()
        kept = alive
        time.sleep(0.02)
    print(made, flush=True)


if __name__ == "__main__":
    main()
