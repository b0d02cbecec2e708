"""The coordinator's placement by fragmentation: the same snapshot, request and choice as ``placement.place``.

Records know memory and devices; what they do not know yet (compute shares, several devices) counts
as nothing. A device is as free as its memory, and the mix is that of the live sessions' quotas.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from rgpu.migrate.placement import Choice, Request, Snapshot, device_refuses, node_refuses, place
from rgpu.migrate.scheduling import placing
from rgpu.migrate.scheduling.index import Index, build
from rgpu.migrate.scheduling.mix import Mix, mix
from rgpu.migrate.scheduling.snapshot import WHOLE, Demand, Device, Node
from rgpu.migrate.scheduling.snapshot import Request as Wanted
from rgpu.migrate.scheduling.snapshot import Snapshot as Pool

MIB = 1 << 20


def place_by_fragmentation(snapshot: Snapshot, request: Request) -> Choice:
    """The device where the pool fragments least; best-fit among equals.

    Raises what :func:`rgpu.migrate.placement.place` raises, with the same reasons.
    """
    place(snapshot, request)  # raises with a reason for each device when there is none
    index = _index(snapshot, request)
    allowed = np.zeros_like(index.usable)
    for row, node in enumerate(snapshot.nodes):
        if request.host not in (None, node.host) or node_refuses(node, request) is not None:
            continue
        for column, device in enumerate(node.devices):
            free = snapshot.free(node, device, request.session)
            allowed[row, column] = (request.device in (None, device.device)
                                    and device_refuses(node, device, request, free) is None)
    # What fits was decided above, to the byte; here a quota of a broken MiB must not say otherwise.
    wanted = Wanted(request.session, Demand(1, 0, request.quota // MIB))
    found = placing.place(index, wanted, allowed=allowed)
    if found is None:
        return place(snapshot, request)
    node = snapshot.nodes[index.rows[found.host]]
    device = node.devices[found.devices[0]]
    return Choice(node.host, device.device, found.reason, snapshot.free(node, device, request.session))


def _index(snapshot: Snapshot, request: Request) -> Index:
    nodes = tuple(Node(node.host, tuple(Device(d.device, d.memory // MIB, d.healthy) for d in node.devices))
                  for node in snapshot.nodes)
    index = build(Pool(nodes), _mix(snapshot))
    for row, node in enumerate(snapshot.nodes):
        for column, device in enumerate(node.devices):
            index.memory[row, column] = snapshot.free(node, device, request.session) // MIB
    index.refresh()
    return index


def _mix(snapshot: Snapshot) -> Mix:
    """Classes from the live sessions' quotas, as a share of the pool's most usual device."""
    sizes = Counter(device.memory for node in snapshot.nodes for device in node.devices)
    usual = max(sizes.most_common(1)[0][0], 1)
    quotas = [session.quota for session in snapshot.sessions if session.live and session.quota > 0]
    return mix(Demand(1, max(1, min(WHOLE, -(-quota * WHOLE // usual)))) for quota in quotas)
