"""Readers of what users, programs and strangers send, as functions of bytes: see :mod:`tests.fuzz.readers`."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import lz4.block
import msgspec
import zstandard
from blake3 import blake3

from rgpu.checkpoint.store import archive
from rgpu.link import invitations
from rgpu.link.control import intake
from rgpu.link.data import proofs, tickets
from rgpu.link.data.agreement import Share
from rgpu.link.data.opening import Opening
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.link.messages.data import CLIENT_HEAD_LAYOUT, MAGIC, PREAMBLE
from rgpu.migrate.records import schema
from rgpu.migrate.records.quotas import QuotaRecord
from rgpu.migrate.records.revoked import RevokedRecord
from rgpu.migrate.records.secrets import SecretsRecord
from rgpu.server.device.cpu import fatbin, ptxlink
from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.module import PtxModule
from rgpu.server.device.cpu.ptx.syntax.parser import parse
from rgpu.server.device.cuda.work import binaries
from rgpu.session.errors import RgpuError

_SCRATCH = Path(os.environ.get("TMPDIR", "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()))
_POOL = bytes(range(32))
_AGENT = KeyPair("user", "ada", "on4g8iD2XR-:3HytX3guI<k0Wp#fA<>x?.CdG$R>", "&e1%!BuRogj--arM7<DBvSZsYT1dqda07m?JaU[.")
_NODE = KeyPair("node", "a", "7EOHo]Sdqox9UB=1(TpW0$pNm(mZbX!i#}}HH[1+", "VT7IS(QfsSV=UW(z71C>:Fj1=S3uM%1vwm9h5>VR")

_HEADER = ".version 8.4\n.target sm_75\n.address_size 64\n"
_KERNEL = (_HEADER + ".global .align 4 .b32 seen[2] = {1, 2};\n.shared .b32 s[4];\n"
           ".visible .entry k(.param .u64 p, .param .u32 n) {\n.reg .b32 %r<6>;\n.reg .b64 %rd<3>;\n.reg .pred %p<2>;\n"
           "ld.param.u64 %rd1, [p];\nld.param.u32 %r1, [n];\nmov.u32 %r2, %tid.x;\nsetp.ge.u32 %p1, %r2, %r1;\n"
           "@%p1 bra DONE;\nmul.wide.u32 %rd2, %r2, 4;\nadd.u64 %rd1, %rd1, %rd2;\n"
           "atom.global.add.u32 %r3, [%rd1], 1;\n"
           "shfl.sync.idx.b32 %r4, %r3, 0, 31, 0xffffffff;\nbar.sync 0;\nst.shared.u32 [s], %r4;\n"
           "DONE:\nret;\n}\n")
_CALLS = (_HEADER + ".func (.param .b32 r) f(.param .b32 a) {\n.reg .b32 %r<3>;\nld.param.u32 %r1, [a];\n"
          "add.u32 %r2, %r1, 1;\nst.param.u32 [r], %r2;\nret;\n}\n.visible .entry k(.param .u64 p) {\n"
          ".reg .b32 %r<3>;\n{\n.param .b32 x;\n.param .b32 y;\nst.param.u32 [x], 3;\ncall (y), f, (x);\n"
          "ld.param.u32 %r1, [y];\n}\nts: .branchtargets A, B;\nbrx.idx %r1, ts;\nA:\nB:\nret;\n}\n")


def ptx(data: bytes) -> None:
    """PTX up to the LLVM IR of each kernel; nothing is compiled."""
    try:
        PtxModule(parse(data.decode(errors="replace"), 75))
    except PtxError:
        pass


def linked_ptx(data: bytes) -> None:
    """Two texts with a zero byte between, merged as cuLink* does."""
    first, _, second = data.partition(b"\0")
    try:
        ptxlink.merge([("a", first.decode(errors="replace")), ("b", second.decode(errors="replace"))])
    except RgpuError:
        pass


def fat_binary(data: bytes) -> None:
    """A module binary or an object file with some in it, for either device."""
    for read in (lambda: fatbin.extract_ptx(data, 75), lambda: fatbin.embedded_ptx(data, 75),
                 lambda: binaries.chosen(data, (9, 0))):
        try:
            read()
        except RgpuError:
            pass


def cubin(data: bytes) -> None:
    """Symbol tables of machine code; what is found lies in its durable sections."""
    for whole in (data, b"\x7fELF" + data):
        found = binaries.variables(whole)
        assert all(one.name for one in found)
        binaries.place(found, {one.name: (1 << 40, one.size) for one in found[:1]})


def archived(data: bytes) -> None:
    """An archive of a checkpoint: as it stands, and with the index, which the last two bytes measure, made right."""
    for whole in (data, _indexed(data)):
        path = _SCRATCH / f"fuzz-{os.getpid()}.rgpu-image"
        path.write_bytes(whole)
        try:
            with archive.ArchiveReader(path) as reader:
                for found in reader.ls(""):
                    assert len(reader.read(found.name)) <= found.size
                checkpoint = reader.checkpoint()
                for number in range(len(checkpoint.state.regions)):
                    checkpoint.read_pages(number, 0, 1)
        except RgpuError:
            pass
        finally:
            path.unlink()


def _indexed(data: bytes) -> bytes:
    body = archive._HEAD.pack(archive.MAGIC, archive.VERSION, 0) + data[:-2]
    length = min(int.from_bytes(data[-2:], "little"), max(0, len(body) - archive._HEAD.size))
    at = len(body) - length
    return body + archive._END.pack(archive.END_MAGIC, archive.VERSION, 0, at, length, blake3(body[at:]).digest())


def control_message(data: bytes) -> None:
    """A request on the control link, from each role."""
    for role in ("user", "node"):
        try:
            found = intake.read(data, role)
        except intake.Unreadable:
            continue
        assert isinstance(found.args, dict) and isinstance(found.verb, str)


RECORDS = (schema.SessionRecord, schema.NodeRecord, schema.QueueRecord, schema.HostRecord, schema.PoolRecord,
           schema.LeaderRecord, schema.HistoryRecord, schema.KeyRecord, schema.InvitationRecord, QuotaRecord,
           RevokedRecord, SecretsRecord)


def registry_record(data: bytes) -> None:
    """A record of each kind; what is taken says the same again."""
    for kind in RECORDS:
        try:
            found = schema.decode(data, kind, "fuzz/x")  # type: ignore[type-var]
        except RgpuError:
            continue
        assert schema.decode(schema.encode(found), kind, "fuzz/x") == found  # type: ignore[type-var]


def invitation(data: bytes) -> None:
    try:
        invitations.decode(data.decode(errors="replace"))
    except RgpuError:
        pass


def preamble(data: bytes) -> None:
    """What a stranger sends to the data port: nobody without a key gets in."""
    opening, at = Opening([_POOL], lambda ticket: 7, _NODE), 0
    try:
        while opening.needed:
            piece, at = data[at:at + opening.needed], at + opening.needed
            if len(piece) < opening.needed:
                return
            opening.take(piece)
    except RgpuError:
        return
    assert opening.answer and (opening.error is None) != (opening.handover is None)
    if opening.handover is not None:
        assert opening.handover.session == "s", "a ticket was made without a key"


# -- seeds -----------------------------------------------------------------------------
def _fat(*parts: tuple[int, int, bytes, int]) -> bytes:
    """A fat binary of (kind, flags, payload, size when unpacked)."""
    body = b""
    for kind, flags, payload, size in parts:
        head = struct.pack("<HHIQII", kind, 0, 64, len(payload), len(payload) if flags else 0, 0)
        body += head + struct.pack("<HHIQQQQ", 0, 0, 75, 0, flags, 0, size) + payload
    return struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


def _fat_seeds() -> list[bytes]:
    text = _KERNEL.encode() + b"\0"
    packed = lz4.block.compress(text, store_size=False)
    whole = [_fat((1, 0, text, 0)), _fat((1, fatbin.FLAG_LZ4, packed, len(text))),
             _fat((1, fatbin.FLAG_ZSTD, zstandard.compress(text), len(text)), (2, 0, _elf(), 0))]
    return [*whole, bytes(100) + whole[0] + whole[1], text]


def _elf() -> bytes:
    names, strings = b"\0.nv.global\0.symtab\0.strtab\0", b"\0seen\0"
    symbol = struct.pack("<IBBHQQ", 1, 1, 0, 1, 8, 16)
    at = 64
    rows, body = [(0,) * 10], b""
    for name, kind, data, link in ((1, 8, b"", 0), (12, 2, bytes(24) + symbol, 3), (20, 3, strings, 0),
                                   (20, 3, names, 0)):
        rows.append((name, kind, 0, 0, at + len(body), len(data) or 64, link, 0, 0, 0))
        body += data
    table = at + len(body)
    head = b"\x7fELF\2\1\1".ljust(40, b"\0") + struct.pack("<Q", table) + bytes(10) + struct.pack("<HHH", 64, 5, 4)
    return head + body + b"".join(struct.pack("<IIQQQQIIQQ", *row) for row in rows)


def _archive_seeds() -> list[bytes]:
    encode = msgspec.msgpack.encode
    blob = b"a manifest that is none"
    index = encode([("images/x", 16, len(blob))])
    plain = blob + index + len(index).to_bytes(2, "little")
    return [_indexed(plain), plain, encode([("packs/a", 16, 0), ("images/x/manifest", 16, 0)]) + b"\x30\0"]


def _control_seeds() -> list[bytes]:
    encode = msgspec.msgpack.encode
    return [encode({"id": "1", "verb": "session.list", "args": {}}),
            encode({"id": "2", "verb": "node.command", "args": {"verb": "worker.start", "args": {"session": "s"}},
                    "leader": 7, "epoch": 2, "command": "c", "grant": ""}),
            encode({"id": "3", "verb": "image.import", "args": {"id": "a", "offset": 0, "data": bytes(70_000)}})]


def _record_seeds() -> list[bytes]:
    session = schema.SessionRecord(name="s", state="running", owner="a", incarnation=1, epoch=2, quota=3, agent="k",
                                   device="cpu:0", failures=[schema.Failure(host="b", device="cpu:0")])
    device = schema.DeviceRecord(device="cpu:0", memory=1 << 30)
    return [schema.encode(one) for one in (
        session, schema.NodeRecord(host="a", incarnation=1, control="c", data="d", devices=[device]),
        schema.QueueRecord(name="q", quota=1), schema.HostRecord(host="a"), schema.PoolRecord(),
        schema.LeaderRecord(host="a", incarnation=1),
        schema.HistoryRecord(when=1.0, decision="create", reason="r", session="s"),
        schema.KeyRecord(name="n", role="user", public="p"), QuotaRecord(user="ada", limits={"sessions": 3}))]


def _invitation_seeds() -> list[bytes]:
    pair = invitations.new_pair()
    token = invitations.Token(pool="p", name="n", public=pair.public, secret=pair.secret, expires=2e9,
                              endpoints=[Endpoint("tcp://127.0.0.1:1", _NODE.public, "a")])
    return [invitations.encode(token).encode()]


def _preamble_seeds() -> list[bytes]:
    found = [proofs.prove(_AGENT, _NODE.public, "s"), tickets.issue(_POOL, "s", _AGENT.public, "calls", now=4e9),
             tickets.issue(proofs.own_secret(_NODE), "s", "m", "pages", now=4e9)]
    return [CLIENT_HEAD_LAYOUT.pack(MAGIC, PREAMBLE, purpose, len(one.ticket)) + one.ticket + Share().data
            for one, purpose in zip(found, (1, 1, 2), strict=True)]


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "ptx": (ptx, lambda: [_KERNEL.encode(), _CALLS.encode()]),
    "linked_ptx": (linked_ptx, lambda: [_KERNEL.encode() + b"\0" + _CALLS.encode()]),
    "fat_binary": (fat_binary, _fat_seeds), "cubin": (cubin, lambda: [_elf()]), "archive": (archived, _archive_seeds),
    "control_message": (control_message, _control_seeds), "registry_record": (registry_record, _record_seeds),
    "invitation": (invitation, _invitation_seeds), "preamble": (preamble, _preamble_seeds),
}
