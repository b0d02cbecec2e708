"""Records of nodes and sessions."""

from __future__ import annotations

from rgpu.migrate.records.schema import DeviceRecord, MoveRecord, NodeRecord, SessionRecord


def node(host: str, *memory: int, **values: object) -> NodeRecord:
    devices = [DeviceRecord(device=f"cpu:{n}", memory=size, compute_capability=(7, 5), driver_version=13000)
               for n, size in enumerate(memory)]
    return NodeRecord(host=host, incarnation=1, control="", data="", devices=devices).replace(**values)


def session(name: str, host: str, quota: int, device: str = "cpu:0", state: str = "running",
            move: MoveRecord | None = None) -> SessionRecord:
    return SessionRecord(name=name, state=state, owner=host, incarnation=1, epoch=1, quota=quota, agent="",  # type: ignore[arg-type]
                         device=device, move=move)
