"""What a request gets that asks neither for memory nor for GPUs."""

from __future__ import annotations

import pytest

from rgpu.migrate.leader.defaults import check_default, largest_share, refusal, with_default
from rgpu.migrate.leader.requests import Order, read_order
from rgpu.migrate.records.schema import DeviceRecord, NodeRecord, Wants
from rgpu.migrate.scheduling.adapter import place_by_fragmentation
from rgpu.migrate.scheduling.placement import Snapshot
from rgpu.session.errors import UsageError
from tests.support.leader.records import node, session

GIB = 1 << 30


def gpus(host: str, *sizes: int, kind: str = "cuda") -> NodeRecord:
    devices = [DeviceRecord(device=f"{kind}:{n}", name="NVIDIA H200", memory=size) for n, size in enumerate(sizes)]
    return node(host, devices=devices)


def asked(**args: object) -> Order:
    return read_order({"name": "s", **args}, "key")


def test_a_whole_gpu_where_the_devices_are_gpus() -> None:
    pool = Snapshot((gpus("a", 139 * GIB, 139 * GIB),), ())
    found = with_default(asked(), pool, "")
    assert (found.quota, found.wants.compute, found.wants.gpus, found.defaulted) == (139 * GIB, 100, 1, "1")
    assert found.wants.kind == "", "a pool of GPUs needs no word on it"


def test_what_is_asked_for_keeps_its_meaning() -> None:
    pool = Snapshot((gpus("a", 100 * GIB),), ())
    memory = with_default(asked(memory=4 * GIB), pool, "0.25")
    assert (memory.quota, memory.wants.compute, memory.defaulted) == (4 * GIB, 0, "")
    share = with_default(asked(options={"gpus": "0.5"}), pool, "0.25")
    assert (share.quota, share.wants.compute, share.defaulted) == (50 * GIB, 50, "")
    compute = with_default(asked(options={"compute": 30}), pool, "")
    assert (compute.quota, compute.wants.compute) == (100 * GIB, 30)


def test_the_cpu_device_stays_small_unless_the_pool_says_more() -> None:
    pool = Snapshot((gpus("a", 8 * GIB, kind="cpu"),), ())
    small = with_default(asked(), pool, "")
    assert (small.quota, small.wants.compute, small.defaulted) == (GIB, 0, "")
    said = with_default(asked(), pool, "0.25")
    assert (said.quota, said.wants.compute, said.defaulted) == (2 * GIB, 25, "0.25")


def test_among_other_devices_a_gpu_is_meant() -> None:
    pool = Snapshot((gpus("a", 8 * GIB, kind="cpu"), gpus("b", 24 * GIB)), ())
    found = with_default(asked(), pool, "")
    assert found.quota == 24 * GIB and place_by_fragmentation(pool, found.request()).host == "b"


def test_a_refusal_names_the_largest_share() -> None:
    taken = session("x", "a", 40 * GIB, "cuda:0").replace(wants=Wants(compute=60))
    small = session("y", "a", GIB, "cuda:1")
    pool = Snapshot((gpus("a", 100 * GIB, 100 * GIB),), (taken, small))
    order = with_default(asked(), pool, "")
    why = refusal(order, pool, "cuda:0 of a is full")
    assert why.startswith("no GPU is free (the default of this pool") and why.endswith("; cuda:0 of a is full"), why
    assert "the largest share that is free is 0.99 of cuda:1 of a: --gpus 0.99" in why
    assert refusal(asked(memory=GIB), pool, "why") == "why"
    full = Snapshot(pool.nodes, (taken.replace(wants=Wants(compute=100)), small.replace(quota=100 * GIB)))
    assert largest_share(full, order.request()) == \
        "no share of a GPU is free, 61440 MiB of memory are on cuda:0 of a: --memory"


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "seven", "99", "nan"])
def test_a_default_that_makes_no_sense(text: str) -> None:
    with pytest.raises(UsageError):
        check_default(text)


def test_defaults_that_do() -> None:
    assert [check_default(text) for text in ("1", "0.25", " 2 ", "")] == ["1", "0.25", "2", ""]
