"""``rgpu doctor``: what on this machine, or in the pool, would keep rgpu from working."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from rgpu.api.settings import Settings
from rgpu.cli import common
from rgpu.cli.helpers import doctor_pool
from rgpu.cli.helpers.finding import Finding
from rgpu.cli.pool import pool_files
from rgpu.cli.resident import beginning, surroundings
from rgpu.client.run import compile_cache
from rgpu.migrate.registry.open import open_registry
from rgpu.server.node import belonging
from rgpu.session.addresses import DEVICE_BASE, DEVICE_STRIDE
from rgpu.session.errors import Refused, RgpuError


@click.command("doctor")
@common.pool_option
@common.output_option
@common.verb
def command(pool: str | None, output: str) -> None:
    """Check this machine and the pool; exits 1 if a check fails."""
    settings = common.settings(pool=pool)
    findings = [asdict(finding) for finding in _all(settings)]
    common.emit(findings, output, _show)
    sys.exit(0 if all(f["ok"] for f in findings) else 1)


def _show(findings: list[dict[str, Any]]) -> None:
    for finding in findings:
        mark = "[green]ok  [/green]" if finding["ok"] else "[red]FAIL[/red]"
        common.out.print(f"{mark} {escape(finding['check'])}: {escape(finding['found'])}")
        if not finding["ok"] and finding["advice"]:
            common.out.print(f"     {finding['advice']}", markup=False)


def _all(settings: Settings) -> Iterator[Finding]:
    checks: dict[str, Callable[[], Finding]] = {
        "python": _python, "client library": _shim, "address range": _addresses,
        "address randomisation": _randomisation, "shared memory": _memfd, "boot clock": _boot_clock, "gpu": _gpu,
        "compile cache": _compile_cache, "residents": lambda: _residents(settings),
        "box": lambda: _box(settings), "registry": lambda: _registry(settings)}
    for name, check in checks.items():
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 - a check that fails is a finding
            yield Finding(name, False, str(error))
    try:
        yield from doctor_pool.findings(settings)
    except Exception as error:  # noqa: BLE001 - the same
        yield Finding("pool", False, str(error))


def _python() -> Finding:
    return Finding("python", sys.version_info >= (3, 11), sys.version.split()[0], "rgpu needs Python 3.11 or newer")


def _compile_cache() -> Finding:
    """Results of NVRTC that are kept for the programs of this user."""
    where = compile_cache.folder(os.environ)
    if where is None or not where.exists():
        return Finding("compile cache", True, "off" if where is None else f"none yet in {where}")
    found = compile_cache.survey(where)
    if found.damaged:
        path, why = next(iter(found.damaged.items()))
        more = f" (and {len(found.damaged) - 1} more)" if len(found.damaged) > 1 else ""
        return Finding("compile cache", False, f"{path} is damaged: {why}{more}",
                       "it counts as none, and its kernel is compiled again: delete it")
    return Finding("compile cache", True, f"{found.files} results of NVRTC, {found.size >> 10} KiB in {where}")


def _residents(settings: Settings) -> Finding:
    """Processes of this user that start the agents of plain runs (`rgpu.cli.resident`)."""
    folder = surroundings.folder()
    if not settings.resident:
        return Finding("residents", True, "off")
    try:
        there, failed = beginning.living(), beginning.failed()
    except PermissionError as error:
        return Finding("residents", False, str(error), f"each run starts slowly: remove it, or `chmod 700 {folder}`")
    if failed:
        return Finding("residents", False, f"one could not start: {failed[0].splitlines()[-1]}",
                       f"each run starts slowly; the whole reason is in {folder}/*.begun")
    told = ", ".join(f"{one.pid} ({one.pool})" for one in there)
    return Finding("residents", True, f"{told} in {folder}" if told else "none: the next plain `rgpu run` starts one")


def _shim() -> Finding:
    from rgpu.client.run.launcher import shim_directory

    path = shim_directory() / "libcuda.so.1"
    for name in (path, path.with_name("libnvidia-ml.so.1")):
        if not name.exists():
            return Finding("client library", False, f"{name} is missing", "install the package again: pip install .")
    code = subprocess.run([sys.executable, "-c", f"import ctypes; l = ctypes.CDLL({str(path)!r}); "
                           "v = ctypes.c_int(); print(l.cuDriverGetVersion(ctypes.byref(v)))"],
                          capture_output=True, text=True, timeout=20)
    return Finding("client library", code.returncode == 0, str(path), code.stderr.strip()[-200:])


def _addresses() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fixed_noreplace, private_anonymous, noreserve = 0x100000, 0x22, 0x4000
    got = libc.mmap(DEVICE_BASE, DEVICE_STRIDE, 0, fixed_noreplace | private_anonymous | noreserve, -1, 0)
    ok = got == DEVICE_BASE
    if ok:
        libc.munmap(ctypes.c_void_p(DEVICE_BASE), ctypes.c_size_t(DEVICE_STRIDE))
    return Finding("address range", ok, f"8 TiB at 0x{DEVICE_BASE:x} {'can' if ok else 'cannot'} be reserved",
                   "is `ulimit -v` set, or vm.overcommit_memory=2?")


def _randomisation() -> Finding:
    ok = subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0 if shutil.which("setarch") \
        else ctypes.CDLL(None).personality(0xFFFFFFFF) != -1
    return Finding("address randomisation", ok, "workers can switch it off" if ok else "it cannot be switched off here",
                   "personality(ADDR_NO_RANDOMIZE) is forbidden (seccomp?): moves of sessions with module globals may "
                   "be refused on GPUs")


def _memfd() -> Finding:
    fd = os.memfd_create("rgpu-doctor", os.MFD_ALLOW_SEALING)
    os.close(fd)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return Finding("shared memory", True, f"sealed memfds work; {common.size(free)} free in /dev/shm")


def _boot_clock() -> Finding:
    """Leases are judged by CLOCK_BOOTTIME, which advances while the machine is suspended (OWNERSHIP 4)."""
    ahead = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return Finding("boot clock", ahead > -1.0, "goes on over suspension" + (
        f"; this machine slept for {ahead:.0f} s since it started" if ahead > 1 else ""),
        "CLOCK_BOOTTIME is behind CLOCK_MONOTONIC: a time namespace that leases cannot be judged in")


def _gpu() -> Finding:
    from rgpu.server.node.devices import driver

    try:
        from rgpu.server.device.cuda.facts import facts

        found = facts(0)
    except Exception as error:  # noqa: BLE001 - a missing driver is no failure: clients and cpu nodes need none
        return Finding("gpu", True, f"none that a node here could serve: {driver.explain(error, 'cuda:0')}")
    return Finding("gpu", True, f"{found.name}, compute capability {'.'.join(map(str, found.compute_capability))}, "
                   f"driver {found.driver_version // 1000}.{found.driver_version % 1000 // 10}")


def _box(settings: Settings) -> Finding:
    """The walls that a node here would put around its workers, and what is missing for the others."""
    from rgpu.checkpoint.blobs import places
    from rgpu.server.box import host
    from rgpu.server.box.walls import Mode, decide

    root = pool_files(settings).root
    store = places.parse(settings.store or str(root / "images"))
    missing = host.missing(folders=[root, *([Path(store.path)] if store.is_directory else [])])
    stands = [one.wall.name for one in decide(Mode.AUTO, missing, users="root" not in missing, asked=("io",))
              if one.stands]
    lacking = "; ".join(f"{name}: {reason}" for name, reason in sorted(missing.items()))
    ways = [] if "root" in missing else ["those of namespaces with --worker-uids"]
    ways += ["io with --worker-io"] if "io" in stands else []
    return Finding("workers' box", True, f"walls to be had here: {', '.join(stands)}"
                   + (f" ({', '.join(ways)})" if ways else "")
                   + (f"; missing: {lacking}" if lacking else ""))


def _registry(settings: Settings) -> Finding:
    """Whether this host reaches the pool's registry as a node would, and whether it belongs to that pool."""
    files = pool_files(settings)
    said = (common.registry_address(settings) or "embedded") if settings.given("registry") else ""
    advice = "docs/operators/etcd.md says how etcd is set up and named"
    hosts = sorted(path.parent.name for path in files.root.glob("nodes/*/node.key"))
    try:
        # A folder that was never a node's has no registry of its own that could conflict.
        known = [belonging.look(files, host) for host in hosts] if files.description_path.exists() else []
        addresses = [belonging.choose(said, one) for one in known]
        for one, address in zip(known, addresses, strict=True):
            if address != one.at_home or one.embedded:  # else there is no registry to read yet
                belonging.judge(one, asyncio.run(belonging.read(address)), belonging.ours(files, one.host))
        if not known and not said and files.description_path.exists() and not files.node_directory("x").parent.exists():
            return Finding("registry", True, "the nodes' own: this machine needs none")
        address = addresses[0] if addresses else said
        if not address.startswith("etcd"):
            return Finding("registry", True, "embedded, in the pool's directory")
        return Finding("registry", True, f"{belonging.without_options(address)} answers, revision "
                       f"{asyncio.run(_revision(address))}" + (f"; it holds pool {known[0].described.id}" if known
                                                                else ""))
    except Refused as error:
        return Finding("registry", False, error.message, "started so, the node here would refuse: "
                       "docs/operators/pool.md, \"To which pool a node belongs\"")
    except RgpuError as error:
        return Finding("registry", False, error.message, advice)


async def _revision(address: str) -> int:
    registry = await open_registry(address)
    try:
        return await registry.revision()
    finally:
        await registry.close()
