"""Arrays, texture and surface objects: what is published, the quota, the codes for what is wrong."""

from __future__ import annotations

WORDS = """
    import struct
    def array3(w, h, d, form=0x20, channels=1, flags=0, levels=0):
        handle = P()
        description = struct.pack("<QQQiII4x", w, h, d, form, channels, flags)
        if levels:
            code = cu.cuMipmappedArrayCreate(c.byref(handle), description, levels)
        else:
            code = cu.cuArray3DCreate_v2(c.byref(handle), description)
        return code, handle.value
    def made(*given, **named):
        code, handle = array3(*given, **named)
        ok(code)
        return handle
    def side(array=0, host=0, device=0, x=0, y=0, z=0, pitch=0, height=0):
        kind = 3 if array else 1 if host else 2
        return struct.pack("<QQQQi4xQQQQQQ", x, y, z, 0, kind, host, device, array, 0, pitch, height)
    def copy3(source, destination, w, h=1, d=1):
        return cu.cuMemcpy3D_v2(source + destination + struct.pack("<QQQ", w, h, d))
    def resource(kind, *words):
        return struct.pack("<i4x", kind) + struct.pack(f"<{len(words)}Q", *words).ljust(128, b"\\0") + bytes(8)
    SAMPLING = struct.pack("<3iiII", 1, 1, 1, 0, 0, 0).ljust(104, b"\\0")
    def texture(what, sampling=SAMPLING, view=None):
        handle = U64()
        return cu.cuTexObjectCreate(c.byref(handle), what, sampling, view), handle.value
    def surface(what):
        handle = U64()
        return cu.cuSurfObjectCreate(c.byref(handle), what), handle.value
"""


def test_an_array_is_memory_of_the_session(agent, program):
    """Rows at a pitch of 32 bytes; copies go through it, and the array is brought up to date in stream order."""
    told = program(agent, WORDS + """
    context()
    before = info()[0]
    handle = made(10, 6, 3)
    back, there = c.create_string_buffer(10 * 4 * 6 * 3), bytes(range(240)) * 3
    source = c.create_string_buffer(there, 720)
    ok(copy3(side(host=c.addressof(source), pitch=40, height=6), side(array=handle), 40, 6, 3))
    ok(copy3(side(array=handle), side(host=c.addressof(back), pitch=40, height=6), 40, 6, 3))
    tell(back.raw == there[:720])
    part = c.create_string_buffer(16)
    ok(copy3(side(array=handle, x=8, y=2, z=1), side(host=c.addressof(part)), 8, 2))
    tell([part.raw[:8] == there[240 + 88:240 + 96], part.raw[8:] == there[240 + 128:240 + 136]])
    device = alloc(64)
    ok(copy3(side(array=handle, y=5, z=2), side(device=device), 40))
    tell(d2h(device, 40) == there[680:720])
    other = made(10, 6, 3)
    ok(copy3(side(array=handle), side(array=other), 40, 6, 3))
    ok(cu.cuArrayDestroy(P(handle)))
    ok(cu.cuArrayDestroy(P(other)))
    ok(free(device))
    tell(before - info()[0])
    """).end()
    assert told == [True, [True, True], True, 0]
    (first, _) = agent.args("array_create")
    assert (first.width, first.height, first.depth, first.format, first.channels) == (10, 6, 3, 0x20, 1)
    assert first.levels == 0
    names = [name for name in agent.names() if name.startswith(("memcpy", "array", "memory_to"))]
    assert names[:2] == ["array_create", "memcpy2d_h2d"] and names[2:4] == ["memory_to_array", "array_to_memory"]
    assert names[-3:] == ["memcpy_d2d", "memory_to_array", "array_destroy"] or names[-2:] == ["array_destroy"] * 2
    boxes = agent.args("array_to_memory")
    assert [(box.x, box.y, box.z, box.width, box.height, box.depth) for box in boxes[:3]] == [
        (0, 0, 0, 40, 6, 3), (8, 2, 1, 8, 2, 1), (0, 5, 2, 40, 1, 1)]


def test_levels_share_the_memory(agent, program):
    told = program(agent, WORDS + """
    context()
    handle = made(16, 8, 0, levels=99)               # clamped to 5
    levels = []
    for level in range(5):
        part = P()
        ok(cu.cuMipmappedArrayGetLevel(c.byref(part), P(handle), level))
        room = c.create_string_buffer(40)
        ok(cu.cuArray3DGetDescriptor_v2(room, part))
        levels.append(struct.unpack_from("<QQQ", room.raw))
        data = c.create_string_buffer(bytes([level]) * 512, 512)
        w, h = levels[-1][:2]
        ok(copy3(side(host=c.addressof(data), pitch=4 * w), side(array=part.value), 4 * w, h))
    again = P()
    ok(cu.cuMipmappedArrayGetLevel(c.byref(again), P(handle), 4))
    tell([levels, again.value == part.value, cu.cuMipmappedArrayGetLevel(c.byref(again), P(handle), 5)])
    out = c.create_string_buffer(4)
    ok(copy3(side(array=part.value), side(host=c.addressof(out)), 4))
    tell([list(out.raw), cu.cuArrayDestroy(part), cu.cuArrayDestroy(P(handle)), cu.cuMipmappedArrayDestroy(P(handle)),
          cu.cuMipmappedArrayDestroy(P(handle)), cu.cuArray3DGetDescriptor_v2(room, part)])
    """).end()
    extents = [[16, 8, 0], [8, 4, 0], [4, 2, 0], [2, 1, 0], [1, 1, 0]]
    assert told == [[extents, True, 1], [[4] * 4, 400, 400, 0, 400, 400]]
    assert [box.level for box in agent.args("memory_to_array")] == [0, 1, 2, 3, 4]
    assert agent.args("array_create")[0].levels == 5


def test_what_no_array_can_be(agent, program):
    told = program(agent, WORDS + """
    context()
    tell({
        "no width": array3(0, 1, 0)[0], "three channels": array3(8, 8, 0, channels=3)[0],
        "no format": array3(8, 8, 0, form=0)[0], "a depth without a height": array3(8, 0, 8)[0],
        "layers": array3(8, 0, 8, flags=1)[0], "a cube": array3(8, 8, 6, flags=4)[0],
        "no cube": array3(8, 9, 6, flags=4)[0], "five faces": array3(8, 8, 5, flags=4)[0],
        "cubes": array3(8, 8, 12, flags=5)[0], "unknown flags": array3(8, 8, 0, flags=1 << 20)[0],
        "sparse": array3(8, 8, 0, flags=0x40)[0], "planes": array3(8, 8, 0, form=0xb0)[0],
        "too much": array3(1 << 14, 1 << 14, 0)[0], "null": cu.cuArray3DCreate_v2(None, bytes(40)),
        "no levels": cu.cuMipmappedArrayCreate(c.byref(P()), bytes(40), 0),
    })
    """).end()[0]
    assert told == {
        "no width": 1, "three channels": 1, "no format": 1, "a depth without a height": 1, "layers": 0, "a cube": 0,
        "no cube": 1, "five faces": 1, "cubes": 0, "unknown flags": 1, "sparse": 801, "planes": 801, "too much": 2,
        "null": 1, "no levels": 1}


def test_copies_that_are_wrong(agent, program):
    told = program(agent, WORDS + """
    context()
    handle, row = made(8, 4, 0), made(64, 0, 0, form=1)
    host = c.create_string_buffer(4096)
    at = c.addressof(host)
    device = alloc(4096)
    tell({
        "wild": copy3(side(host=at), side(array=0x1234560), 4),
        "not an array": copy3(side(array=device), side(host=at), 4),
        "beyond x": copy3(side(host=at), side(array=handle, x=28), 8),
        "beyond y": copy3(side(host=at), side(array=handle), 4, 5),
        "beyond z": copy3(side(host=at), side(array=handle, z=1), 4),
        "half an element": copy3(side(host=at), side(array=handle), 6),
        "between elements": copy3(side(host=at), side(array=handle, x=2), 4),
        "pitch": copy3(side(host=at, pitch=16), side(array=handle), 32, 2),
        "unallocated": copy3(side(array=handle), side(device=device + 4090), 32),
        "row": cu.cuMemcpyHtoA_v2(P(row), SIZE(60), host, SIZE(4)),
        "over": cu.cuMemcpyHtoA_v2(P(row), SIZE(61), host, SIZE(4)),
        "wild row": cu.cuMemcpyAtoH_v2(host, P(at), SIZE(0), SIZE(4)),
        "on the device": cu.cuMemcpyAtoD_v2(U64(device), P(row), SIZE(60), SIZE(4)),
        "back": cu.cuMemcpyDtoA_v2(P(row), SIZE(0), U64(device), SIZE(4)),
        "both": cu.cuMemcpyAtoA_v2(P(row), SIZE(0), P(row), SIZE(32), SIZE(32)),
        "stream": cu.cuMemcpyHtoAAsync_v2(P(row), SIZE(0), host, SIZE(4), P(0x1234560)),
    })
    """).end()[0]
    assert told == {
        "wild": 400, "not an array": 400, "beyond x": 1, "beyond y": 1, "beyond z": 1, "half an element": 1,
        "between elements": 1, "pitch": 1, "unallocated": 1, "row": 0, "over": 1, "wild row": 400, "on the device": 0,
        "back": 0, "both": 0, "stream": 400}


def test_objects_and_their_handles(agent, program):
    """The handle is the device's; that it was given stands in the journal right behind the call."""
    told = program(agent, WORDS + """
    context()
    picture, plain = made(8, 8, 0, flags=2), made(8, 8, 0)
    memory = alloc(4096)
    first, second = texture(resource(0, picture)), surface(resource(0, picture))
    linear = resource(2, memory, 32 | 1 << 32, 4096)
    third = texture(linear)
    tell([first[0], second[0], third[0], len({first[1], second[1], third[1]})])
    room = c.create_string_buffer(144)
    ok(cu.cuTexObjectGetResourceDesc(room, U64(third[1])))
    same = room.raw == linear
    sampling = c.create_string_buffer(104)
    ok(cu.cuTexObjectGetTextureDesc(sampling, U64(first[1])))
    tell([same, sampling.raw == SAMPLING])
    tell({
        "wild array": texture(resource(0, 0x1234560))[0], "no kind": texture(resource(9, picture))[0],
        "mips of a plain one": texture(resource(1, picture))[0], "null": texture(None)[0],
        "no sampling": texture(resource(0, picture), None)[0],
        "beyond memory": texture(resource(2, memory, 32 | 1 << 32, 4097))[0],
        "wild memory": texture(resource(2, 0xdeadbeef00, 32 | 1 << 32, 64))[0],
        "three channels": texture(resource(2, memory, 32 | 3 << 32, 64))[0],
        "pitch": texture(resource(3, memory, 32 | 1 << 32, 16, 4, 32))[0],
        "a surface of memory": surface(linear)[0],
        "texture as surface": cu.cuSurfObjectDestroy(U64(first[1])), "wild": cu.cuTexObjectDestroy(U64(99)),
        "no view": cu.cuTexObjectGetResourceViewDesc(room, U64(first[1])),
        "ended": [cu.cuTexObjectDestroy(U64(first[1])), cu.cuTexObjectDestroy(U64(first[1]))],
        "surface": cu.cuSurfObjectDestroy(U64(second[1])),
    })
    """).end()
    assert told[0] == [0, 0, 0, 3] and told[1] == [True, True]
    assert told[2] == {
        "wild array": 400, "no kind": 1, "mips of a plain one": 400, "null": 1, "no sampling": 1, "beyond memory": 1,
        "wild memory": 1, "three channels": 1, "pitch": 1, "a surface of memory": 1, "texture as surface": 400,
        "wild": 400, "no view": 1, "ended": [0, 400], "surface": 0}
    names = agent.names()
    for at, name in enumerate(names):
        if name == "texture_create":
            assert "texture_place" in names[at + 1:at + 3], names[at:at + 4]
    assert [args.handle for args in agent.args("texture_place")] == [
        args.texture << 20 | 7 for args in agent.args("texture_create")]


def test_a_context_takes_its_arrays_along(agent, program):
    told = program(agent, WORDS + """
    context()
    before = info()[0]
    handle = made(512, 512, 0)
    code, object = texture(resource(0, handle))
    tell([code, before - info()[0] >= 1 << 20])
    ok(cu.cuDevicePrimaryCtxReset_v2(0))
    context()
    tell([info()[0] == before, cu.cuArrayDestroy(P(handle)), cu.cuTexObjectDestroy(U64(object))])
    """).end()
    assert told == [[0, True], [True, 400, 400]]
    names = [name for name in agent.names() if "destroy" in name]
    assert names.index("texture_destroy") < names.index("array_destroy") < names.index("context_destroy")


def test_references_are_refused_by_name(agent, program):
    running = program(agent, """
        context()
        tell([cu.cuTexRefCreate(c.byref(P())), cu.cuModuleGetTexRef(c.byref(P()), None, b"t")])
        """)
    assert running.end() == [[801, 801]]
    assert "cuTexRefCreate" in running.errors() and "cuModuleGetTexRef" in running.errors()


