"""What the programs of the chaos share: steps at a given pace, a mark for each, one digest. They know nothing of rgpu.

``PROGRAM STEPS SECONDS …``: so many steps, spread over at least so many seconds (0: as fast as they go). They go in
bursts: the program rests before each BURST of steps and queues these without waiting, as a training does; it does not
make up for a time in which it had to wait. The pace changes nothing of what is computed. Each step prints ``step N``,
with the first digits of what it saw where it looked at the device, and the last line is ``digest HEX`` of all that it
saw. Exit status 77 and ``skip REASON``: this machine lacks what the program needs.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

BURST = 10


class Steps:
    """Iterate over it; :meth:`saw` what the device gave, :meth:`end` with what remains."""

    def __init__(self) -> None:
        self.count, self.seconds = int(sys.argv[1]), float(sys.argv[2])
        self._digest = hashlib.sha256()
        self._seen = ""

    def __iter__(self) -> Iterator[int]:
        due = time.monotonic()
        for number in range(self.count):
            if number % BURST == 0:
                time.sleep(max(0.0, due - time.monotonic()))
                due = time.monotonic() + self.seconds * BURST / self.count
            self._seen = ""
            yield number
            print(f"step {number} {self._seen}".rstrip(), flush=True)

    def saw(self, *values: Any) -> None:
        """Of this step: goes into the digest, and its own first digits into the mark."""
        data = b"".join(map(raw, values))
        self._digest.update(data)
        self._seen = hashlib.sha256(data).hexdigest()[:12]

    def end(self, *values: Any) -> None:
        for value in values:
            self._digest.update(raw(value))
        print("digest", self._digest.hexdigest(), flush=True)


def last_of_burst(number: int) -> bool:
    """Where programs wait for the device, and look."""
    return number % BURST == BURST - 1


def raw(value: Any) -> bytes:
    """The bytes of a number, of an array or of a tensor of any framework."""
    if hasattr(value, "detach"):  # PyTorch
        value = value.detach().cpu().contiguous()
        import torch

        return value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if hasattr(value, "get") and hasattr(value, "device"):  # CuPy
        value = value.get()
    import numpy

    return numpy.ascontiguousarray(numpy.asarray(value)).tobytes()


def skip(reason: object) -> NoReturn:
    print(f"skip {reason}", flush=True)
    sys.exit(77)


def torch_setup(seed: int = 1) -> Any:
    """PyTorch with its GPU, seeded; deterministic algorithms only."""
    try:
        import torch
    except ImportError as error:
        skip(f"PyTorch cannot be imported: {error}")
    if not torch.cuda.is_available():
        skip("PyTorch finds no GPU")
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    return torch
