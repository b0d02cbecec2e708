"""Stream memory operations of the cpu device."""

from __future__ import annotations

import struct

import pytest

from rgpu.server.device.cpu import CpuDevice
from rgpu.server.device.cpu.work.words import AND, EQ, GEQ, NOR, met
from rgpu.session.errors import DeviceError
from tests.server.device.cpu_device.conftest import WAIT, Client

STREAM, OTHER = 30, 31
WRITE32, WRITE64, WAIT32, WAIT64 = range(4)


def give(client: Client, stream: int, kind: int, address: int, value: int, flags: int = 0) -> int:
    seq = next(client.seqs)
    client.device.memory_operation(seq, stream, kind, address, value, flags)
    return seq


@pytest.mark.parametrize(("form", "found", "value", "bits", "expected"), [
    (GEQ, 5, 5, 32, True), (GEQ, 4, 5, 32, False), (GEQ, 2, 0xFFFF_FFFE, 32, True), (GEQ, 0xFFFF_FFFE, 2, 32, False),
    (GEQ, 1 << 40, 1, 64, True), (EQ, 7, 7, 32, True), (EQ, 7, 8, 64, False), (AND, 6, 2, 32, True),
    (AND, 6, 1, 32, False), (NOR, 0xFFFF_FFF0, 0xF, 32, False), (NOR, 0xFFFF_FFF0, 7, 32, True),
    (NOR, 0xFFFF_FFFF, 0, 64, True)])
def test_forms_of_waits(form: int, found: int, value: int, bits: int, expected: bool) -> None:
    assert met(form, found, value, bits) is expected


def test_a_stream_waits_for_what_another_writes(client: Client, device: CpuDevice) -> None:
    base = client.base
    for stream in (STREAM, OTHER):
        device.create_stream(stream, 16, 1, 0)
    give(client, STREAM, WAIT32, base, 3, GEQ)
    give(client, STREAM, WAIT64, base + 8, 1 << 40, EQ)
    last = give(client, STREAM, WRITE32, base + 16, 0x1_0000_0007)  # of which 32 bits count
    assert not device.wait_complete(last, 0.05)
    give(client, OTHER, WRITE32, base, 4)
    assert not device.wait_complete(last, 0.05)
    give(client, OTHER, WRITE64, base + 8, 1 << 40)
    assert device.wait_complete(last, WAIT)
    assert struct.unpack("<IIQII", client.read(base, 24, STREAM)) == (4, 0, 1 << 40, 7, 0)


def test_wrong_operations_and_a_wait_without_end(client: Client, device: CpuDevice) -> None:
    for kind, address in ((4, client.base), (WRITE32, 64), (WAIT64, client.base - 4)):
        with pytest.raises(DeviceError) as caught:
            give(client, 0, kind, address, 0)
        assert caught.value.result == 1
    device.create_stream(STREAM, 16, 1, 0)
    forever = give(client, STREAM, WAIT32, client.base, 1, EQ)
    device.close()
    assert device.wait_complete(forever, WAIT)
