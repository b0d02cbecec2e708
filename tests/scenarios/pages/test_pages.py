"""The pages for operators and users, word for word: a script reads their command blocks and runs them on machines that
are namespaces, each with a name, an address and files of its own.

Left out are only the commands that bring the package (it is at /opt/rgpu already), and a GPU is a cpu device.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pages.machines import TOKEN, Machines
from tests.support.pages.page import Block, blocks
from tests.support.pools.hosts import Network, unavailable
from tests.support.pools.pool import EXAMPLES, ROOT
from tests.support.registry.etcd_cluster import needs_etcd

pytestmark = [needs_etcd, pytest.mark.timeout(1800)]

needs_etcdctl = pytest.mark.skipif(shutil.which("etcdctl") is None,
                                   reason="no etcdctl on this machine (Debian: etcd-client)")
HOSTS = ("node-a", "node-b", "node-c")
OF_THE_PROGRAM = ("cuda-core>=0.5", "cuda-bindings>=13.0,<13.4", "nvidia-cuda-nvrtc==13.0.88")  #: what it imports
PEOPLE = {"each host": HOSTS, "each member": HOSTS, **{host: (host,) for host in (*HOSTS, "node-d")},
          "the operator's machine": ("node-b",), "your laptop": ("laptop",), "the new node-a": ("node-a",)}


def package(folder: Path, wheel: bool) -> Path:
    """What is at /opt/rgpu: the checkout's environment, or one with nothing but the wheel."""
    if not wheel:
        return Path(sys.prefix)
    (built,) = (ROOT / "build" / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "opt")], check=True)
    subprocess.run([str(folder / "opt" / "bin" / "pip"), "install", "--quiet", str(built), *OF_THE_PROGRAM], check=True,
                   timeout=900)
    return folder / "opt"


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machines]:
    reason = unavailable() or ("" if shutil.which("nsenter") else "there is no `nsenter` here (Debian: util-linux)") \
        or ("" if os.geteuid() == 0 else "this is not root")
    if reason:
        pytest.skip(f"the pages are not executed here: {reason}")
    where = package(tmp_path, getattr(request, "param", False))
    with Network((*HOSTS, "node-d", "laptop")) as network, Machines(tmp_path / "machines", network, where) as made:
        try:
            yield made
        finally:
            (tmp_path / "transcript").write_text("\n".join(made.done))


def boot_hosts(machines: Machines) -> None:
    """The page "A pool of several hosts", from nothing."""
    for host in HOSTS:
        machines.boot(host)
    machines.run(blocks("operators/pool.md", "Three hosts from nothing"), PEOPLE)


def boot_laptop(machines: Machines) -> None:
    """The page "Start", with a pool elsewhere."""
    laptop = machines.boot("laptop")
    # Its virtual environment is active, and a program is there.
    laptop.sh("export PATH=/opt/rgpu/bin:$PATH; cd /home/user; cat > train.py <<END\n"
              f"import runpy, sys\nsys.argv = ['train.py', '--steps', '20']\n"
              f"runpy.run_path('{EXAMPLES / 'heat.py'}', run_name='__main__')\nEND\n")
    printed = machines.run(blocks("users/start.md", "With a pool elsewhere"), PEOPLE)
    assert "logged in to pool" in printed and "digest" in printed, printed


def nodes(machines: Machines, name: str) -> set[str]:
    rows = json.loads(machines[name].sh("rgpu nodes -o json"))
    return {row["host"] for row in rows if row.get("answers")}


def wait_nodes(machines: Machines, name: str, hosts: set[str], seconds: float = 60.0) -> None:
    def seen() -> bool:
        with contextlib.suppress(AssertionError):
            return nodes(machines, name) == hosts
        return False

    eventually(seen, lambda: f"{name} sees {nodes(machines, name)}, not {hosts}", seconds, every=0.5)


def every_verb(machines: Machines, name: str, others: tuple[str, str], operator: bool) -> None:
    """From that machine, with one of three hosts gone: look, run, move, checkpoint, end; as operator also lead."""
    one, other = others
    sh = machines[name].sh
    sh(f"((rgpu run --name {name} --host {one} -- /opt/rgpu/bin/python {EXAMPLES / 'heat.py'} --steps 2000000 "
       f"> /run/{name}.out 2>&1; echo ended >> /run/{name}.out) &)\n"
       f"until grep -qE '^(step|ended)' /run/{name}.out; do sleep 0.2; done; ! grep -q ended /run/{name}.out || "
       f"{{ cat /run/{name}.out; false; }}")
    sh(f"rgpu ps && rgpu describe {name} && rgpu pool status && rgpu history {name}")
    sh(f"rgpu keys list && rgpu logs {name}")
    sh(f"rgpu migrate {name} {other} && rgpu checkpoint {name} && rgpu image ls && rgpu kill {name}")
    if operator:
        sh(f"rgpu cordon {one} && rgpu uncordon {one} && rgpu pool pause && rgpu pool resume && rgpu rebalance && "
           f"rgpu keys invite --user from-{name}")


def test_the_first_hour_and_the_loss_of_the_first_host(machines: Machines) -> None:
    boot_hosts(machines)
    boot_laptop(machines)
    machines["node-a"].destroy()
    for name in ("node-b", "laptop"):
        ran = machines[name].sh(f"rgpu ps && rgpu run -- /opt/rgpu/bin/python {EXAMPLES / 'heat.py'} --steps 20")
        assert "digest" in ran
    wait_nodes(machines, "laptop", {"node-b", "node-c"})


@pytest.mark.slow
@needs_etcdctl
@pytest.mark.parametrize("machines", [True], indirect=True, ids=["wheel"])
def test_hosts_that_come_and_go(machines: Machines) -> None:
    """A host is added and taken out, the first one destroyed and replaced; every verb from every machine.

    With nothing but the wheel on each.
    """
    boot_hosts(machines)
    boot_laptop(machines)
    other = TOKEN.findall(machines["node-b"].sh("rgpu keys invite --user other --role operator"))[-1]
    machines["node-c"].sh(f"export PATH=/opt/rgpu/bin:$PATH; rgpu login {other}")
    wait_nodes(machines, "laptop", set(HOSTS))
    came = blocks("operators/operations.md", "Hosts that come and go")
    lost = next(n for n, block in enumerate(came) if "rgpu leave --yes node-a" in block.commands)
    machines.boot("node-d")
    machines.run(came[:lost], PEOPLE)  # added, and taken out
    wait_nodes(machines, "laptop", set(HOSTS))

    machines["node-a"].destroy()
    wait_nodes(machines, "laptop", {"node-b", "node-c"})
    for name in ("node-b", "node-c", "laptop"):
        every_verb(machines, name, ("node-b", "node-c"), operator=name != "laptop")

    machines.run(came[lost:lost + 1], PEOPLE)
    machines.boot("node-a")
    machines.run(setup_of_a_host(), PEOPLE | {"each host": ("node-a",)})
    machines.run(came[lost + 1:], PEOPLE)
    wait_nodes(machines, "laptop", set(HOSTS))


@pytest.mark.slow
@needs_etcdctl
def test_upgrade_and_backup(machines: Machines) -> None:
    """A host is upgraded; a registry that was set back is restored and adopted."""
    boot_hosts(machines)
    boot_laptop(machines)
    machines.run(blocks("operators/upgrades.md", "One host"), PEOPLE)
    machines.run(blocks("operators/etcd.md", "Backup"), PEOPLE)
    machines["laptop"].sh(f"rgpu run --name after -- /opt/rgpu/bin/python {EXAMPLES / 'heat.py'} --steps 20")
    machines.run(blocks("operators/etcd.md", "Restoring etcd"), PEOPLE)
    wait_nodes(machines, "laptop", set(HOSTS))
    ran = machines["laptop"].sh(f"rgpu run -- /opt/rgpu/bin/python {EXAMPLES / 'heat.py'} --steps 20")
    assert "digest" in ran


@pytest.mark.slow
@needs_etcdctl
def test_the_keys_of_the_first_host_are_restored(machines: Machines) -> None:
    """Its folder is deleted, and restored from a backup that a revocation and a rotation followed.

    A session goes on meanwhile, its checkpoint is read, users run programs, and who was revoked stays out.
    """
    boot_hosts(machines)
    boot_laptop(machines)
    laptop, first, operator = machines["laptop"], machines["node-a"], machines["node-b"]
    leaves = TOKEN.findall(operator.sh("rgpu keys invite --user leaves"))[-1]
    laptop.sh(f"rgpu login --no-use --name of-leaves {leaves}; rgpu ps --context of-leaves")
    machines.run(blocks("operators/etcd.md", "Backup"), PEOPLE)
    operator.sh("rgpu keys revoke --yes leaves; rgpu keys rotate")
    laptop.sh(f"(rgpu run --name goes-on --host node-a -- /opt/rgpu/bin/python {EXAMPLES / 'heat.py'} --steps 2000000 "
              "> /run/goes-on.out 2>&1 &)\nuntil grep -q step /run/goes-on.out; do sleep 0.2; done")
    image = json.loads(laptop.sh("rgpu checkpoint goes-on -o json"))["image"]

    first.sh("rm -rf /var/lib/rgpu/pool")
    machines.run(blocks("operators/etcd.md", "Restoring a host's keys"), PEOPLE)
    wait_nodes(machines, "laptop", set(HOSTS))
    assert "digest" in laptop.sh(f"rgpu run --host node-a -- /opt/rgpu/bin/python {EXAMPLES / 'heat.py'} --steps 20")
    where = json.loads(laptop.sh("rgpu describe goes-on -o json"))["host"]
    other = next(host for host in HOSTS if host != where)
    laptop.sh(f"rgpu migrate goes-on {other} && rgpu image verify {image} && rgpu kill goes-on")
    for machine in (laptop, first):
        assert "leaves" not in machine.sh("rgpu keys list")
    refused = laptop.sh("rgpu ps --context of-leaves", check=False)
    assert "leaves" in refused or "key" in refused, refused


def setup_of_a_host() -> list[Block]:
    """What "three hosts from nothing" does on each host; its etcd is made to join afterwards."""
    found = [block for block in blocks("operators/pool.md", "Three hosts from nothing") if block.where == "each host"]
    return [replace(block, commands=block.commands.replace("systemctl enable --now etcd\n", "")) for block in found]


def test_every_block_says_whose_it_is() -> None:
    pages = ("users/start.md", "With a pool elsewhere"), ("operators/pool.md", ""), ("operators/operations.md", ""), \
        ("operators/upgrades.md", ""), ("operators/etcd.md", "")
    for page, section in pages:
        found = blocks(page, section)
        assert found and {block.where for block in found} <= set(PEOPLE), page
