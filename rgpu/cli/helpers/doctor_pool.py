"""The checks of ``rgpu doctor`` that query the pool: keys, nodes, clocks, versions, drivers, disk space.

Each judgement is a function of the pool's answers, so that it can be tested without a pool.
"""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rgpu.api.settings import Settings
from rgpu.cli import common
from rgpu.cli.helpers.finding import Finding
from rgpu.cli.pool import connect, pool_files
from rgpu.link import versions
from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles
from rgpu.link.secrets import PoolSecrets
from rgpu.session.errors import RgpuError, VersionMismatch

CLOCK_LIMIT = 10.0  #: seconds; tickets tolerate 30 (docs/developers/links/sealing.md), and clocks drift further
ROOM_LIMIT = 1 << 30  #: bytes free where registry and checkpoints are
ASK_SECONDS = 4.0


def findings(settings: Settings) -> Iterator[Finding]:
    """Yield the results of all checks of the pool."""
    files = pool_files(settings)
    if not files.description_path.exists():
        yield Finding("pool", True, f"none in {files.root}; `rgpu up` makes one, `rgpu login` or `rgpu server "
                      "--join` joins one")
        return
    yield keys(files)
    yield room(files)
    try:
        with connect(settings) as client:
            status, listed = client.call("pool.status", {}, timeout=5), client.call("node.list", {}, timeout=5)
            endpoints = client.call("pool.ping", {}, timeout=5)["endpoints"]
    except RgpuError as error:
        yield Finding("pool", False, error.message, "start it with `rgpu up` or `rgpu server`; is this its directory?")
        return
    nodes = listed["nodes"]
    yield from judge_pool(status, nodes, listed.get("lost", []))
    seen = {str(e["host"]): ask(KeyPair.load(files.key_for("user")), Endpoint(e["address"], e["public"], e["host"]))
            for e in endpoints}
    yield judge_reach(seen)
    yield judge_clocks({host: answer for host, answer in seen.items() if isinstance(answer, dict)})
    yield judge_versions({host: answer for host, answer in seen.items() if isinstance(answer, dict)})
    yield judge_drivers(nodes)


def keys(files: PoolFiles) -> Finding:
    """Check that every key in the folder loads, is private, and is authorized under its own name."""
    problems, good = [], 0
    paths = [*sorted((files.root / "keys").glob("*.key")), *sorted(files.root.glob("nodes/*/node.key"))]
    for path in paths:
        try:
            KeyPair.load(path)
            good += 1
        except RgpuError as error:
            problems.append(error.message)
    secret = files.root / "secret"
    if secret.exists():
        try:
            PoolSecrets(files)
        except RgpuError as error:
            problems.append(error.message)
    directory = files.root / "keys" / "authorized"
    if directory.exists() and stat.S_IMODE(directory.stat().st_mode) & 0o022:
        problems.append(f"{directory} can be written by others: they could let their own keys in")
    listed = {key.public for key in files.authorized.all()}
    if len(listed) < len(list(directory.glob("*.pub"))):
        problems.append(f"a file in {directory} cannot be read as a key, or a key stands there twice")
    return Finding("keys", not problems, "; ".join(problems) or f"{good} key pairs here, private; "
                   f"{len(listed)} let in by this folder", "chmod 600, or make the key anew (`rgpu keys`)")


def room(files: PoolFiles) -> Finding:
    """Check that there is disk space for the registry and for checkpoints."""
    free = shutil.disk_usage(files.root).free
    return Finding("room", free >= ROOM_LIMIT, f"{common.size(free)} free in {files.root}",
                   "a full disk stops the embedded registry and checkpoints: make room")


def ask(pair: KeyPair, endpoint: Endpoint) -> dict[str, Any] | str:
    """Ping one node. Return its {offset, error: seconds, versions, version}, or why it did not answer."""
    try:
        with ControlClient(pair, [endpoint]) as client:
            client.call("pool.ping", {}, timeout=ASK_SECONDS)  # the first one also connects
            before = time.time()
            answer = client.call("pool.ping", {}, timeout=ASK_SECONDS)
            after = time.time()
    except RgpuError as error:
        return error.message
    there = float(answer.get("time") or 0.0)
    return {"offset": there - (before + after) / 2 if there else None, "error": (after - before) / 2,
            "versions": answer.get("versions"), "version": answer.get("version")}


def judge_pool(status: dict[str, Any], nodes: list[dict[str, Any]], lost: Sequence[dict[str, Any]] = ()
               ) -> Iterator[Finding]:
    """Judge the pool: which node leads, which is silent or sick. Operators' decisions are reported, but no fault."""
    sick = [f"{n['host']} is {n['state'] if n.get('answers', True) else 'silent'}"
            + (f" ({n['reason']})" if n.get("reason") else "")
            for n in nodes if n["state"] == "unhealthy" or not n.get("answers", True)]
    sick += [f"{d['device']} of {n['host']} is unhealthy" + (f" ({d['reason']})" if d.get("reason") else "")
             for n in nodes for d in n["devices"] if not d["healthy"]]
    sick += [f"{n['host']} is lost since {common.moment(n['lost_since'])}" for n in lost]
    gone = {n["host"] for n in lost}
    aside = [f"{n['host']} is {n['state']}" for n in nodes if n["state"] in ("cordoned", "draining")]
    aside += [f"{host} is away" for host in status.get("away", []) if host not in gone]
    yield Finding("nodes", bool(nodes) and not sick, "; ".join([f"{len(nodes)} in the pool", *sick, *aside]),
                  "look at the daemon's log on that host (`journalctl -u rgpu-node`)"
                  + (f"; a host that does not come back: `rgpu leave {lost[0]['host']}`" if lost else ""))
    yield Finding("coordinator", bool(status.get("leader")), str(status.get("leader") or "nobody leads"),
                  "one is elected within a lease's time, if any node runs with --coordinator auto or only")
    yield Finding("automation", not status.get("paused"), f"paused: {status['paused_reason']}"
                  if status.get("paused") else "on", "lost sessions wait; `rgpu pool resume` lets it go on")


def judge_reach(seen: dict[str, dict[str, Any] | str]) -> Finding:
    """Judge whether every control address can be reached from here: agents fail over between them."""
    silent = [f"{host}: {answer}" for host, answer in sorted(seen.items()) if isinstance(answer, str)]
    return Finding("control addresses", not silent, "; ".join(silent) or f"all {len(seen)} answer here",
                   "is the port open (docs/operators/pool.md, Ports)? Does --listen name an address that is reached?")


def judge_clocks(seen: dict[str, dict[str, Any]]) -> Finding:
    """Judge the nodes' clocks. They must agree, because tickets carry times; leases do not depend on them."""
    known = {host: answer for host, answer in seen.items() if answer.get("offset") is not None}
    wrong = [f"{host} is {answer['offset']:+.1f} s off" for host, answer in sorted(known.items())
             if abs(answer["offset"]) - answer["error"] > CLOCK_LIMIT]
    worst = max((abs(answer["offset"]) for answer in known.values()), default=0.0)
    return Finding("clocks", not wrong, "; ".join(wrong) or f"{len(known)} nodes within {worst:.2f} s of this one",
                   f"run a time service; more than {CLOCK_LIMIT:.0f} s is near the 30 s at which tickets are refused")


def judge_versions(seen: dict[str, dict[str, Any]]) -> Finding:
    """Judge the nodes' versions: N works with N-1, on every link."""
    wrong = []
    for host, answer in sorted(seen.items()):
        try:
            versions.check(answer.get("versions"), host)
        except VersionMismatch as error:
            wrong.append(error.message)
    kinds = sorted({str(answer.get("version")) for answer in seen.values()})
    return Finding("versions", not wrong, "; ".join(wrong) or f"nodes run {', '.join(kinds) or 'nothing'}",
                   "upgrade one version at a time, nodes first")


def judge_drivers(nodes: list[dict[str, Any]]) -> Finding:
    """List the kinds of device: a session moves to the same compute capability, and to no older driver."""
    kinds: dict[str, list[str]] = {}
    for node in nodes:
        for device in node["devices"]:
            capability = ".".join(str(part) for part in device.get("compute_capability") or ())
            kind = f"{device['device'].partition(':')[0]} {capability}, driver {device.get('driver_version')}"
            kinds.setdefault(kind, []).append(node["host"])
    alone = [f"{hosts[0]} alone has {kind}" for kind, hosts in sorted(kinds.items()) if len(set(hosts)) == 1]
    told = "; ".join(f"{kind}: {len(hosts)}" for kind, hosts in sorted(kinds.items())) or "no devices"
    # One node, or one of each kind, is no fault; sessions there cannot be moved.
    return Finding("drivers", True, told + (f"; {'; '.join(alone)}: its sessions can move nowhere else"
                                            if alone and len(nodes) > 1 else ""))
