"""Virtual memory calls, tensor maps and pools: what the shim answers itself, and what it sends."""

from __future__ import annotations

import textwrap

from tests.support.shim.virtual_memory import VMM


def code(text: str) -> str:
    return VMM + textwrap.dedent(text)


def test_quota_is_held_from_create_until_the_last_of_release_and_unmap(agent, program):
    told = program(agent, code("""
        context()
        G = 2 << 20
        at = reserve(64 << 20)
        handle = create(G)
        made = info()[0]
        ok(map_at(at, G, handle))
        ok(cu.cuMemRelease(U64(handle)))
        mapped = info()[0]
        ok(unmap(at, G))
        tell([made >> 20, mapped >> 20, info()[0] >> 20])
        ok(cu.cuMemAddressFree(U64(at), SIZE(64 << 20)))
        """)).end()
    assert told == [[254, 254, 256]]
    assert agent.names().count("memory_map") == agent.names().count("memory_unmap") == 1
    mapped, = agent.args("memory_map")
    allocated, = agent.args("memory_allocate")
    assert (mapped.address, mapped.size) == (allocated.address, allocated.size)


def traffic(agent) -> list[str]:
    """The calls that concern memory, each with its address in granules behind the first mapping."""
    first = agent.args("memory_map")[0].address
    counters = {}
    told = []
    for name in agent.names():
        if not name.startswith("memory_") and name != "memcpy_d2d":
            continue
        each = agent.args(name)[counters.get(name, 0)]
        counters[name] = counters.get(name, 0) + 1
        if name == "memcpy_d2d":
            told.append(f"copy {(each.source - first) >> 21}>{(each.destination - first) >> 21} {each.size >> 20}")
        elif name == "memory_alias":
            told.append(f"alias {(each.source - first) >> 21}>{(each.address - first) >> 21} {each.size >> 20}")
        elif name == "memory_move":
            told.append(f"move {(each.address - first) >> 21}>{(each.to - first) >> 21} {each.size >> 20}")
        else:
            told.append(f"{name.removeprefix('memory_')} {(each.address - first) >> 21}")
    return told


def test_bytes_outlive_a_mapping_while_the_handle_is_held(agent, program):
    """Mapped back at its place nothing is moved; elsewhere, it is copied; the last release ends it."""
    told = program(agent, code("""
        context()
        G = 2 << 20
        at = reserve(8 * G)
        one = create(G)
        ok(map_at(at, G, one))
        ok(unmap(at, G))
        gone = cu.cuMemsetD8_v2(U64(at), 1, SIZE(1))
        ok(map_at(at, G, one))
        ok(unmap(at, G))
        ok(map_at(at + 3 * G, G, one))
        ok(unmap(at + 3 * G, G))
        held = info()[0] >> 20
        ok(cu.cuMemRelease(U64(one)))
        tell([gone, held, info()[0] >> 20])
        """)).end()
    assert told == [[1, 254, 256]]
    assert traffic(agent) == [
        "map 0", "allocate 0", "free 0", "allocate 0", "free 0", "move 0>3 2", "allocate 3", "free 3", "unmap 3"]


def test_one_handle_at_several_addresses(agent, program):
    """The same bytes at each, and on the quota once; they outlive each mapping of them, the first one too."""
    told = program(agent, code("""
        context()
        G = 2 << 20
        at = reserve(16 * G)
        one, two = create(2 * G), create(2 * G)
        ok(map_at(at, 2 * G, one))
        ok(map_at(at + 4 * G, 2 * G, one))
        ok(map_at(at + 8 * G, 2 * G, one))
        wrong = [map_at(at + 9 * G, 2 * G, one), map_at(at + 4 * G, 2 * G, one)]  # taken
        ok(cu.cuMemRelease(U64(one)))
        h2d(at, b"seen")
        seen = [d2h(at + 4 * G, 4).decode(), d2h(at + 8 * G, 4).decode()]
        ok(unmap(at, 2 * G))
        ok(map_at(at, 2 * G, two))                      # where the first handle's bytes were left
        h2d(at, b"else")
        seen += [d2h(at + 4 * G, 4).decode(), d2h(at + 8 * G, 4).decode(), d2h(at, 4).decode()]
        ok(unmap(at + 4 * G, 2 * G))
        seen += [d2h(at + 8 * G, 4).decode(), info()[0] >> 20]
        ok(unmap(at + 8 * G, 2 * G))
        tell(seen + [info()[0] >> 20] + wrong)
        """)).end()
    assert told == [["seen", "seen", "seen", "seen", "else", "seen", 248, 252, 1, 1]]
    assert traffic(agent)[:6] == ["map 0", "allocate 0", "alias 0>4 4", "allocate 4", "alias 0>8 4", "allocate 8"]
    assert agent.names().count("memory_alias") == 2 and agent.names().count("memory_unalias") == 2
    assert agent.names().count("memory_move") == 1 and agent.names().count("memory_unmap") == 1


def test_another_handle_comes_where_bytes_are_kept(agent, program):
    """They go out of its way, even when their reservation is given back and taken anew, and come back from there."""
    told = program(agent, code("""
        context()
        G = 2 << 20
        at = reserve(4 * G)
        one, two = create(G), create(G)
        ok(map_at(at, G, one))
        ok(unmap(at, G))
        ok(cu.cuMemAddressFree(U64(at), SIZE(4 * G)))
        other = reserve(4 * G, 0, at)                   # not over the kept bytes
        ok(cu.cuMemAddressFree(U64(other), SIZE(4 * G)))
        space = reserve(8 * G)
        ok(map_at(space, G, one))
        ok(unmap(space, G))
        ok(map_at(space, G, two))
        ok(map_at(space + G, G, one))
        tell([other == at])
        """)).end()
    assert told == [[False]]
    lines = traffic(agent)
    moves = [line.split()[1] for line in lines if line.startswith("move")]
    assert len(moves) == 3 and moves[0].startswith("0>") and not any(line.startswith("copy") for line in lines)
    assert moves[1].split(">")[0] == moves[0].split(">")[1], "from where it was to a place of ours"
    assert moves[2].split(">")[0] == moves[1].split(">")[1], "and from there to where it is mapped at last"


def test_neighbouring_mappings_are_one_range_for_copies(agent, program):
    told = program(agent, code("""
        context()
        G = 2 << 20
        at = reserve(64 << 20)
        ok(map_at(at, G, create(G)))
        ok(map_at(at + G, 2 * G, create(2 * G)))
        base, size = U64(), SIZE()
        ok(cu.cuMemGetAddressRange_v2(c.byref(base), c.byref(size), U64(at + G + 5)))
        tell([base.value == at, size.value >> 20])
        """)).end()
    assert told == [[True, 6]]


def test_wrong_mappings_are_codes(agent, program):
    told = program(agent, code("""
        context()
        G = 2 << 20
        at = reserve(8 * G)
        one, two = create(G), create(G)
        codes = [map_at(at - G, G, one), map_at(at + 1, G, one), map_at(at, G, 12345)]
        ok(map_at(at, G, one))
        codes += [map_at(at, G, two)]                   # taken
        codes += [unmap(at, 2 * G), unmap(at + G, G), cu.cuMemAddressFree(U64(at), SIZE(8 * G))]
        handle = U64()
        codes += [cu.cuMemCreate(c.byref(handle), SIZE(G + 1), c.byref(PROP), U64(0)),
                  cu.cuMemCreate(c.byref(handle), SIZE(1 << 40), c.byref(PROP), U64(0)),
                  cu.cuMemRelease(U64(777))]
        tell(codes)
        """)).end()
    assert told == [[1, 1, 1, 1, 1, 1, 1, 1, 2, 1]]


def test_handles_are_mapped_whole(agent, program):
    """Codes and their order as driver 580.159.04 gives them on an H200: 801 comes before a wrong place."""
    told = program(agent, code("""
        context()
        G = 2 << 20
        at, handle = reserve(32 * G), create(4 * G)
        ok(map_at(at, 4 * G, handle))

        def mapped(place, size, offset=0, flags=0):
            return cu.cuMemMap(U64(place), SIZE(size), SIZE(offset), U64(handle), U64(flags))

        tell([mapped(at + 8 * G, G), mapped(at + 8 * G, 2 * G), mapped(at + 8 * G, 4 * G, G), mapped(at + 8 * G, G, G),
              mapped(at + 8 * G, 8 * G), mapped(at + 8 * G, 4 * G - 4096), mapped(at + 8 * G + 4096, G),
              mapped(at + 2 * G, G), mapped(at + 512 * G, G)])
        tell([mapped(at + 8 * G, 0), mapped(at + 8 * G + 4096, 4 * G), mapped(at + 8 * G, 4 * G, 0, 1),
              mapped(at + 8 * G, G, 0, 1), mapped(at + 2 * G, 4 * G), mapped(at + 512 * G, 4 * G)])
        """)).end()
    assert told == [[801] * 9, [1] * 6]


def test_reservations_honour_wishes_and_do_not_overlap(agent, program):
    told = program(agent, code("""
        context()
        G = 2 << 20
        first = reserve(4 * G)
        wished = reserve(4 * G, 0, first + 16 * G)
        taken = reserve(4 * G, 0, first)
        aligned = reserve(G, 1 << 30)
        ok(cu.cuMemAddressFree(U64(first), SIZE(4 * G)))
        tell([(wished - first) // G, taken != first, aligned % (1 << 30), reserve(4 * G) == first])
        """)).end()
    assert told == [[16, True, 0, True]]


def test_a_tensor_map_is_asked_for_once(agent, program):
    told = program(agent, """
        context()
        def encode(address):
            room = c.create_string_buffer(256)
            at = c.addressof(room) + -c.addressof(room) % 64
            four, two = (U64 * 2)(64, 64), (c.c_uint32 * 2)(16, 16)
            code = cu.cuTensorMapEncodeTiled(P(at), 7, c.c_uint32(2), P(address), four, (U64 * 1)(256), two,
                                             (c.c_uint32 * 2)(1, 1), 0, 0, 0, 0)
            return code, c.string_at(at, 128).hex()
        one, again, other = encode(0x1000), encode(0x1000), encode(0x2000)
        tell([one == again, one[0], one[1] != other[1], cu.cuTensorMapEncodeTiled(None, 7, 2, None, None, None, None,
             None, 0, 0, 0, 0)])
        """).end()
    assert told == [[True, 0, True, 1]]
    asked = agent.args("tensor_map")
    assert len(asked) == 2 and asked[0].form == 0
    assert len(asked[0].arguments) == 4 + 4 + 8 + 16 + 8 + 8 + 8 + 16


def test_memory_of_the_cpu_is_mapped_on_both_sides(agent, program):
    """The program reads and writes it at the address that kernels have; its bytes stay with the handle."""
    told = program(agent, code("""
        class Access(c.Structure):
            _fields_ = [("type", c.c_int), ("id", c.c_int), ("flags", c.c_int)]

        context()
        G = 2 << 20
        at, f = reserve(8 * G), kernel()
        grain, made = SIZE(), U64()
        for kind in (2, 3, 4):
            ok(cu.cuMemGetAllocationGranularity(c.byref(grain), c.byref(Prop(1, 0, kind, 0, None)), 0))
        wrong = [cu.cuMemCreate(c.byref(made), SIZE(G), c.byref(Prop(1, 0, kind, where, None)), U64(0))
                 for kind, where in ((0, 0), (3, -1), (7, 0))]
        ok(cu.cuMemCreate(c.byref(made), SIZE(G), c.byref(Prop(1, 0, 2, 0, None)), U64(0)))
        host, plain = made.value, create(G)
        ok(map_at(at, G, host))
        ok(map_at(at + G, G, plain))
        both = (Access * 2)(Access(1, 0, 3), Access(2, 0, 3))
        flags, where = c.c_ulonglong(), Access(2, 0, 0)
        ok(cu.cuMemSetAccess(U64(at), SIZE(G), both, SIZE(2)))
        ok(cu.cuMemGetAccess(c.byref(flags), c.byref(where), U64(at)))
        wrong += [cu.cuMemSetAccess(U64(at + G), SIZE(G), both, SIZE(2)), map_at(at + 4 * G, G, host)]
        c.memset(at, 3, 16)
        ok(launch(f, at, 4))
        ok(cu.cuCtxSynchronize())
        seen = [c.string_at(at, 1)[0]]
        c.memset(at, 5, 16)
        ok(unmap(at, G))
        ok(map_at(at + 4 * G, G, host))
        seen.append(c.string_at(at + 4 * G, 1)[0])
        kind, managed = c.c_uint(), c.c_uint()
        ok(cu.cuPointerGetAttribute(c.byref(kind), 2, U64(at + 4 * G)))
        ok(cu.cuPointerGetAttribute(c.byref(managed), 8, U64(at + 4 * G)))
        tell([wrong, grain.value == G, flags.value, seen, kind.value, managed.value])
        """)).end()
    assert told == [[[1, 1, 1, 801, 801], True, 3, [7, 5], 1, 0]]
