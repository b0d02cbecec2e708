"""The attachment that an agent needs for its session's owner: address, ticket, and the facts of the devices."""

from __future__ import annotations

import time
from typing import Any

from rgpu.link import versions
from rgpu.link.data import tickets
from rgpu.link.secrets import PoolSecrets
from rgpu.migrate.records.schema import NodeRecord, SessionRecord
from rgpu.server.node.pool.records import PoolRecords
from rgpu.session.addresses import device_base
from rgpu.session.devices import parts
from rgpu.session.errors import NotFound
from rgpu.session.facts import PEER_ATOMICS, PEERS, SessionFacts

JOURNAL_LIMIT = 256 << 20


class Attachments:
    """Makes attachments. ``secrets``: the pool's, which sign tickets."""

    def __init__(self, records: PoolRecords, secrets: PoolSecrets) -> None:
        self._records, self._secrets = records, secrets

    async def of(self, record: SessionRecord, public: str, *, ticket: bool = True,
                 with_facts: bool = False) -> dict[str, Any]:
        """Return the attachment to a session, for the agent with the key ``public``. Raises :class:`NotFound`."""
        nodes = await self._records.nodes()
        node = nodes.get(record.owner or "")
        value: dict[str, Any] = {"session": record.name, "owner": record.owner, "epoch": record.epoch,
                                 "state": record.state, "reason": record.reason, "alive": node is not None,
                                 "recover": record.recover, "endpoints": await self.endpoints(nodes),
                                 "time": time.time()}
        if node is not None and record.state in ("running", "moving"):
            host, _, port = node.data.rpartition(":")
            value["address"] = [host, int(port)]
            if node.checks_agents:
                value["public"] = node.public_key
        if ticket:
            granted = tickets.issue(self._secrets.issuing(), record.name, public, "calls")
            value.update(ticket=granted.ticket, secret=granted.secret, expires=granted.expires)
        if with_facts and node is not None:
            value.update(session_facts(node, record.device or "", record.quota, record.name, record.recover),
                         versions=versions.ours(), given=given(record, node))
        return value

    async def endpoints(self, nodes: dict[str, NodeRecord] | None = None) -> list[dict[str, str]]:
        """Control addresses, public keys and names of the living nodes."""
        nodes = nodes if nodes is not None else await self._records.nodes()
        return [{"address": n.control, "public": n.public_key, "host": n.host} for n in nodes.values() if n.control]


def given(record: SessionRecord, node: NodeRecord) -> dict[str, Any]:
    """The session's host, devices and shares, for the line shown to its user at the start; sizes are of each device."""
    devices = node.all_of(record.device)
    return {"host": node.host, "device": devices[0].name if devices else "", "kind": record.needs.kind,
            "gpus": record.wants.gpus, "compute": record.wants.compute, "memory_bytes": record.quota,
            "device_bytes": min((device.memory for device in devices), default=0)}


def session_facts(node: NodeRecord, name: str, quota: int, session: str = "",
                  recover: bool = True) -> dict[str, Any]:
    """The device facts that the program sees; fixed when the session is made. Raises :class:`NotFound`."""
    devices = [device.facts for device in node.all_of(name)]
    if not devices:
        raise NotFound(f"{node.host} has no device {name} any more")
    told = SessionFacts.from_dict({
        "name": session, "number": 1, "driver_version": int(devices[0].get("driver_version", 13000)), "quota": quota,
        "journal_limit": JOURNAL_LIMIT, "recover": recover,
        "devices": [as_session_sees(facts, index, name) for index, facts in enumerate(devices)]})
    return {"facts": told.as_dict(), "driver_release": str(devices[0].get("driver_release") or "")}


def as_session_sees(facts: dict[str, Any], index: int, name: str) -> dict[str, Any]:
    """Translate a node's device facts for the session's ``index``-th device of ``name``: address range and peers.

    The node's facts number the peers that a device reaches by the node's ordinals, the program by the session's.
    """
    attributes = {int(key): value for key, value in (facts.get("attributes") or {}).items()}
    ordinals = [int(one.rpartition(":")[2]) for one in parts(name)]
    for which in (PEERS, PEER_ATOMICS):
        reached = attributes.get(which, 0)
        attributes[which] = sum(1 << n for n, ordinal in enumerate(ordinals) if n != index and reached >> ordinal & 1)
    return {**facts, "attributes": attributes, "range_base": device_base(index)}
