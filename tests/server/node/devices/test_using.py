"""How busy devices are: asked of the driver by one thread, which a sick GPU may hang."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.server.device.cuda import nvml
from rgpu.server.node.devices import using
from rgpu.server.node.devices.using import DeviceUse
from rgpu.server.node.verbs.node_verbs import device_use


def slots(*specs: str) -> Any:
    return {spec: SimpleNamespace(facts=SimpleNamespace(uuid=spec.encode().ljust(16))) for spec in specs}


def test_what_the_driver_tells_is_asked_of_gpus_only() -> None:
    asked: list[bytes] = []

    def read(uuid: bytes) -> dict[str, Any]:
        asked.append(uuid.strip())
        return {"utilization": 0.5, "memory_used": 7} if uuid.startswith(b"cuda:0") else {}

    async def body() -> None:
        use = DeviceUse(slots("cuda:0", "cuda:1", "cpu:0"), read)
        assert await use.look() == {"cuda:0": {"utilization": 0.5, "memory_used": 7}} == await use.look()

    asyncio.run(body())
    assert asked == [b"cuda:0", b"cuda:1"], "once a second"


def test_a_gpu_that_hangs_its_reader_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(using, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(using, "FRESH_SECONDS", 0.0)
    hang, readers = threading.Event(), []

    def read(uuid: bytes) -> dict[str, Any]:
        readers.append(uuid)
        hang.wait(10)
        return {"utilization": 1.0}

    async def body() -> None:
        use = DeviceUse(slots("cuda:0"), read)
        assert [await use.look() for _ in range(3)] == [{}] * 3 and len(readers) == 1
        hang.set()
        await asyncio.sleep(0.2)
        assert await use.look() == {"cuda:0": {"utilization": 1.0}}

    asyncio.run(body())


def test_all_who_ask_at_once_are_answered() -> None:
    async def body() -> None:
        use = DeviceUse(slots("cuda:0"), lambda uuid: {"utilization": 1.0})
        assert await asyncio.gather(*(use.look() for _ in range(4))) == [{"cuda:0": {"utilization": 1.0}}] * 4

    asyncio.run(body())


def test_a_reader_that_fails_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(using, "FRESH_SECONDS", 0.0)
    answers: list[Any] = [OSError("the driver is being replaced"), {"utilization": 1.0}]

    def read(uuid: bytes) -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return dict(answer)

    async def body() -> None:
        use = DeviceUse(slots("cuda:0"), read)
        assert [await use.look() for _ in range(2)] == [{}, {"cuda:0": {"utilization": 1.0}}]

    asyncio.run(body())


def test_nvml_that_is_not_there_or_tells_only_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def refuse(handle: Any) -> Any:
        raise NVMLError

    fake = SimpleNamespace(
        NVMLError=NVMLError, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetUtilizationRates=refuse, nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=5))
    monkeypatch.setattr(nvml, "_library", lambda: (fake, ""))
    assert nvml.usage(bytes(16)) == {"memory_used": 5}
    monkeypatch.setattr(nvml, "_library", lambda: (None, "not installed"))
    assert nvml.usage(bytes(16)) == {}


def test_without_the_driver_its_sessions_tell_it() -> None:
    sessions = [{"device": "cuda:0+1", "gpu": {"recent": 0.7}, "memory_bytes": 10},
                {"device": "cuda:0", "gpu": {"recent": 0.6}, "memory_bytes": 5}, {"device": "cuda:2"}]
    assert device_use("cuda:0", sessions, {}) == {"utilization": 1.0, "memory_used": 15, "use_by": "sessions"}
    assert device_use("cuda:1", sessions, {}) == {"utilization": 0.7, "memory_used": 10, "use_by": "sessions"}
    told = {"utilization": 0.2, "memory_used": 99}
    assert device_use("cuda:0", sessions, told) == {**told, "use_by": "driver"}
