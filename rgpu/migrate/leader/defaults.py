"""Defaults of a request that asks neither for memory nor for GPUs: pure.

It gets a GPU where suitable devices are GPUs, :data:`DEFAULT_QUOTA` of memory on the cpu device (for trying programs),
or the setting of the pool's operators, ``rgpu pool set default-gpus``.
"""

from __future__ import annotations

from dataclasses import replace

from rgpu.migrate.leader.requests import Order
from rgpu.migrate.records.schema import MOST_KERNEL_SECONDS
from rgpu.migrate.scheduling.placement import WHOLE, Request, Snapshot, mebibytes, sized, suitable
from rgpu.migrate.scheduling.snapshot import demand
from rgpu.session.devices import MAX_GPUS
from rgpu.session.errors import UsageError

DEFAULT_QUOTA = 1 << 30  #: bytes, where neither memory nor a share of a GPU was requested, and there is no GPU
GPU = "cuda"  #: the kind of a device that is a GPU


def check_default(text: str) -> str:
    """Check a value of ``rgpu pool set default-gpus``: as ``--gpus``, empty to unset. Raises :class:`UsageError`."""
    text = text.strip()
    if text and demand(text).gpus > MAX_GPUS:
        raise UsageError(f"default-gpus {text}: a session has {MAX_GPUS} GPUs at most")
    if len(text) > 16:
        raise UsageError(f"default-gpus takes a number such as 1 or 0.25, not {text!r}")
    return text


def check_seconds(text: str) -> int:
    """Read a value of ``pool set max-kernel-seconds``: seconds, empty: no limit (0). Raises :class:`UsageError`."""
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:12]) <= MOST_KERNEL_SECONDS:
        raise UsageError(f"max-kernel-seconds takes 1 to {MOST_KERNEL_SECONDS} whole seconds or off, not {text[:40]!r}")
    return int(text)


def with_default(order: Order, snapshot: Snapshot, default_gpus: str) -> Order:
    """Return the order with its memory, and with the pool's default where it asks neither for memory nor for GPUs.

    ``default_gpus``: the pool's setting, empty for none. A request for compute alone stays as it is.
    """
    if order.quota is None and not order.share:
        gpus, kind = default_gpus, ""
        if not gpus:
            kinds = {device.kind for _, device in suitable(snapshot, replace(order.request(), quota=0))}
            gpus = "1" if GPU in kinds else ""
            kind = GPU if gpus and len(kinds) > 1 else ""  # not needed in a pool of GPUs only
        if gpus:
            asked, wants = demand(gpus), order.wants
            order = replace(order, share=asked.compute, defaulted=gpus, wants=wants.replace(
                compute=wants.compute or asked.compute, gpus=asked.gpus, kind=kind))
    return replace(order, quota=sized(snapshot, order.request(), order.share, DEFAULT_QUOTA).quota)


def refusal(order: Order, snapshot: Snapshot, why: str) -> str:
    """Return why there is no place now; where the pool's default does not fit, with the largest free share of a GPU."""
    if not order.defaulted:
        return why
    what = "no GPU is free" if float(order.defaulted) == 1 else f"no {order.defaulted} of a GPU is free" \
        if float(order.defaulted) < 1 else f"no {order.defaulted} GPUs of one host are free"
    return f"{what} (the default of this pool, where neither --gpus nor --memory says another); " \
           f"{largest_share(snapshot, order.request())}; {why}"


def largest_share(snapshot: Snapshot, request: Request) -> str:
    """Return a sentence with the largest free share of a ready device, and the option to request it."""
    best, most = (0, "", 0), (0, "")
    for node, device in suitable(snapshot, replace(request, quota=0, gpus=1)):
        if node.state != "ready" or not device.healthy or not device.memory:
            continue
        free = max(0, snapshot.free(node, device, request.session)) >> 20 << 20
        compute = WHOLE - min(WHOLE, snapshot.compute_promised(node.host, device.device, request.session))
        where = f"{device.device} of {node.host}"
        best = max(best, (min(compute, free * WHOLE // device.memory), where, free))
        most = max(most, (free, where))
    if best[0]:
        return f"the largest share that is free is {best[0] / WHOLE:g} of {best[1]}: --gpus {best[0] / WHOLE:g}"
    if most[0]:
        return f"no share of a GPU is free, {mebibytes(most[0])} of memory are on {most[1]}: --memory"
    return "nothing of any GPU is free"
