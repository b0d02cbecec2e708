"""Memory of other processes: what the shim publishes for it, and what it answers itself."""

from __future__ import annotations

import textwrap

from rgpu.session.objects import handle_tokens
from rgpu.session.objects.handle_tokens import Token, TokenKind
from tests.support.shim.virtual_memory import VMM

GRANULE = 2 << 20
IPC = """
class Handle(c.Structure):
    _fields_ = [("bytes", c.c_ubyte * 64)]

def get(address):
    handle = Handle()
    return cu.cuIpcGetMemHandle(c.byref(handle), U64(address)), bytes(handle.bytes)

def opened(data, flags=1):
    at = U64()
    result = cu.cuIpcOpenMemHandle_v2(c.byref(at), Handle((c.c_ubyte * 64)(*data)), c.c_uint(flags))
    return [result, at.value]

def close(address):
    return cu.cuIpcCloseMemHandle(U64(address))
"""


def code(text: str) -> str:
    return IPC + textwrap.dedent(text)


def token(number: int, size: int, kind: TokenKind = TokenKind.MEMORY) -> list[int]:
    return list(handle_tokens.encode(Token(kind, bytes(range(16)), b"elsewhre", number, size)))


def test_an_allocation_has_one_handle_for_its_life(agent, program):
    told = program(agent, code("""
        context()
        first, second = alloc(4096), alloc(3 << 20)
        _, handle = get(first)
        tell([handle == get(first + 100)[1], handle == get(second)[1], opened(handle)[0], opened(handle, 0)[0]])
        ok(cu.cuMemFree_v2(U64(first)))
        again = alloc(4096)
        tell([again == first, get(again)[1] == handle])
        tell([get(4096)[0], get(second + (5 << 20))[0], cu.cuIpcGetMemHandle(None, U64(second))])
        """)).end()
    assert told == [[True, False, 201, 1], [True, False], [1, 1, 1]]
    assert [name for name in agent.names() if name.startswith("memory_free")] == ["memory_free_wait"], "awaited"
    exports = agent.args("memory_export")
    assert [one.size for one in exports] == [4096, 3 << 20, 4096]
    assert len({bytes(one.secret) for one in exports}) == 3 and all(len(one.secret) == 16 for one in exports)


def test_what_is_opened_stands_at_an_address_of_the_programs_own(agent, program):
    there = 0x2000_0000_0000 + 7 * GRANULE + 512
    told = program(agent, code(f"""
        context()
        before = info()[0]
        data = {token(there, 3 * GRANULE)}
        result, at = opened(data)
        tell([result, at % (2 << 20), opened(data) == [0, at], info()[0] == before])
        tell([get(at)[0], cu.cuMemFree_v2(U64(at)), cu.cuMemsetD8_v2(U64(at), 1, SIZE(3 << 21)),
              cu.cuMemsetD8_v2(U64(at), 1, SIZE((3 << 21) + 1))])
        tell([close(at + 1), close(at), cu.cuMemsetD8_v2(U64(at), 1, SIZE(1)), close(at), close(at),
              cu.cuMemsetD8_v2(U64(at), 1, SIZE(1))])
        ok(cu.cuCtxSynchronize())
        """)).end()
    assert told == [[0, 512, True, True], [1, 1, 0, 1], [1, 0, 0, 0, 1, 1]]
    imported, = agent.args("memory_import")
    allocated, = agent.args("memory_allocate")
    assert (imported.size, imported.device, bytes(imported.token)) == (4 * GRANULE, 0, bytes(token(there, 3 * GRANULE)))
    assert (allocated.address - imported.address, allocated.size) == (512, 3 * GRANULE)
    ended = [name for name in agent.names() if name in ("memory_free", "memory_free_wait", "memory_unimport")]
    assert ended in (["memory_free", "memory_unimport"], ["memory_free_wait", "memory_unimport"])


def test_hostile_handles_are_answered_here(agent, program):
    wild = [token(1 << 45, 0), token(2**64 - 1, 2**63), token(0, 2**64 - 1), token(2**64 - 4096, 4096),
            token(4096, 4096, TokenKind.EVENT), list(range(64)), [0] * 64]
    told = program(agent, code(f"""
        context()
        tell([opened(data)[0] for data in {wild}])
        tell([cu.cuIpcOpenMemHandle_v2(None, Handle(), c.c_uint(1)), close(0)])
        """)).end()
    assert told == [[1] * len(wild), [1, 1]]
    assert "memory_import" not in agent.names()


def test_the_end_of_a_context_lets_go(agent, program):
    program(agent, code(f"""
        context()
        _, at = opened({token(0x2000_0000_0000, 4096)})
        ok(cu.cuDevicePrimaryCtxReset_v2(0))
        """)).end()
    names = agent.names()
    assert names.index("memory_unimport") < names.index("context_destroy")


def test_records_of_an_event_that_others_know_are_awaited(agent, program):
    told = program(agent, code(f"""
        context()
        plain, event, stream, other = P(), P(), P(), P()
        ok(cu.cuEventCreate(c.byref(plain), c.c_uint(2)))
        tell([cu.cuEventCreate(c.byref(event), c.c_uint(4)), cu.cuEventCreate(c.byref(event), c.c_uint(6))])
        ok(cu.cuStreamCreate(c.byref(stream), c.c_uint(1)))
        handle = Handle()
        ok(cu.cuEventRecord(event, stream))
        tell([cu.cuIpcGetEventHandle(c.byref(handle), plain), cu.cuIpcGetEventHandle(c.byref(handle), event),
              cu.cuIpcGetEventHandle(None, event)])
        ok(cu.cuEventRecord(event, stream))
        tell([cu.cuIpcOpenEventHandle(c.byref(other), handle)])
        data = {token(77, 0, TokenKind.EVENT)}
        tell([cu.cuIpcOpenEventHandle(c.byref(other), Handle((c.c_ubyte * 64)(*data))),
              cu.cuIpcOpenEventHandle(c.byref(other), Handle()), cu.cuIpcOpenEventHandle(None, Handle())])
        tell([cu.cuEventQuery(other), cu.cuEventRecord(other, stream), cu.cuIpcGetEventHandle(c.byref(handle), other)])
        ok(cu.cuStreamWaitEvent(stream, other, c.c_uint(0)))
        ok(cu.cuEventSynchronize(other))
        tell([cu.cuEventDestroy_v2(other), cu.cuEventDestroy_v2(other)])
        """)).end()
    assert told == [[1, 0], [400, 0, 1], [201], [0, 1, 1], [600, 801, 400], [0, 400]]
    names = [name for name in agent.names() if "event" in name or name == "applied"]
    assert names == ["event_create", "event_create", "event_record", "event_export", "event_mark", "applied",
                     "event_record", "event_mark", "applied", "event_import", "imported_event_query",
                     "imported_event_wait", "applied", "imported_event_synchronize", "event_unimport"]
    assert [one.flags for one in agent.args("event_create")] == [2, 2], "other processes do not have the driver's own"


def test_a_handle_goes_out_and_comes_in_by_descriptor(agent, program):
    there = 0x2000_0000_0000 + 9 * GRANULE
    told = program(agent, VMM + code(f"""
        import os
        context()
        PROP.handles = 1
        G = 2 << 20

        def export(handle, kind=1):
            fd = c.c_int(-1)
            return cu.cuMemExportToShareableHandle(c.byref(fd), U64(handle), c.c_int(kind), U64(0)), fd.value

        def take(fd, kind=1):
            handle = U64()
            return cu.cuMemImportFromShareableHandle(c.byref(handle), P(fd), c.c_int(kind)), handle.value

        handle, at = create(G), reserve(8 * G)
        tell([export(handle)[0], export(handle, 8)[0], export(77)[0]])
        ok(map_at(at, G, handle))
        first, second = export(handle)[1], export(handle)[1]
        same = os.pread(first, 65, 0) == os.pread(second, 65, 0)
        tell([same, len(os.pread(first, 65, 0)), take(first) == (0, handle)])
        ok(cu.cuMemRelease(U64(handle)))
        free = info()[0]
        data = bytes({token(there, 2 * GRANULE)})
        fd = os.memfd_create("token")
        codes = []
        for wrong in (data[:-1], data + b"x", bytes(64), bytes({token(there + 512, 2 * GRANULE)}),
                      bytes({token(there, 4096)}), bytes({token(there, 1 << 62)}),
                      bytes({token(5, 0, TokenKind.EVENT)})):
            os.ftruncate(fd, 0)
            os.pwrite(fd, wrong, 0)
            codes.append(take(fd)[0])
        reader, _ = os.pipe()
        tell(codes + [take(reader)[0], take(-1)[0], take(first, 8)[0]])
        os.ftruncate(fd, 0)
        os.pwrite(fd, data, 0)
        result, came = take(fd)
        tell([result, take(fd) == (0, came), info()[0] == free])
        ok(cu.cuMemRelease(U64(came)))
        tell([map_at(at + G, G, came), map_at(at, 2 * G, came), map_at(at + G, 2 * G, came),
              map_at(at + 4 * G, 2 * G, came)])
        ok(cu.cuMemsetD8_v2(U64(at + G), 5, SIZE(2 * G)))
        ok(cu.cuMemRelease(U64(came)))
        tell([unmap(at + G, 2 * G), unmap(at + 4 * G, 2 * G), info()[0] == free, map_at(at + G, 2 * G, came)])
        """)).end()
    assert told == [[801, 1, 1], [True, 64, True], [1] * 10, [0, True, True], [801, 1, 0, 0], [0, 0, True, 1]]
    imports = agent.args("memory_import")
    assert len(imports) == 3 and len({one.address for one in imports}) == 3
    assert sorted(one.address for one in agent.args("memory_unimport")) == sorted(one.address for one in imports)
    assert len(agent.args("memory_export")) == 1
