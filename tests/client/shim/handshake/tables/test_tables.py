"""cuGetExportTable: sizes, slots, and what is said of the rest."""

from __future__ import annotations

import pytest

from tests.client.shim.handshake.conftest import Stage

START = r"""
import ctypes as c
d = c.CDLL("libcuda.so.1")
def table(text):
    out = c.POINTER(c.c_void_p)()
    result = d.cuGetExportTable(c.byref(out), bytes.fromhex(text.replace("-", "")))
    assert result == 0, result
    return out
def slot(words, index, *kinds): return c.CFUNCTYPE(c.c_int, *kinds)(words[index])
"""

#: name → (UUID bytes in memory order, words, slots that do something)
TABLES = {
    "CUDART_INTERFACE": ("6bd5fb6c-5bf4-e74a-8987-d93912fd9df9", 13, {1, 2, 6, 8, 12}),
    "RUNTIME_CALLBACK_HOOKS": ("a094798c-2e74-2e74-93f2-0800200c0a66", 7, {1, 2, 3, 4, 6}),
    "TOOLS_TLS": ("42d85a81-23f6-cb47-8298-f6e78a3aecdc", 4, {2}),
    "CTX_CHECKS": ("263e8860-7cd2-6143-92f6-bbd5006dfa7e", 4, {2, 3}),
    "SELF_TEST": ("d4082055-bde6-704b-8d34-ba123c66e1f2", 3, {1}),
    "cuBLAS": ("21318c60-9714-3248-8ca6-41ff7324c8f2", 93, {4, 39, 51}),
    "cuBLASLt": ("1734dc26-800d-4745-8726-c0f1e7dd8bca", 17, set()),
    "module functions": ("6e163fbe-b958-444d-835c-e182aff1991e", 99, {7}),
    "NVRTC": ("da9151d3-3ae6-cc41-a5c0-4f26d533e328", 7, {1, 2, 3, 4, 6}),
}

#: slots that are called and whose callers accept the refusal: nothing is said of them
REFUSED = {"cuBLASLt": {4}}


@pytest.mark.parametrize("name", TABLES)
def test_size_and_other_slots(stage: Stage, name: str) -> None:
    """Word 0 is the size in bytes, no word is null; a slot without a meaning says so, once, by name.

    Unless its callers are known to go on without it.
    """
    uuid, words, named = TABLES[name]
    quiet = REFUSED.get(name, set())
    code = START + f"""
words = table({uuid!r})
assert words[0] == 8 * {words}, words[0]
assert all(words[i] for i in range({words}))
for i in sorted(set(range(1, {words})) - {named!r}):
    assert slot(words, i)() == 801 == slot(words, i)(), i
"""
    outcome = stage.run(code)
    assert outcome.err.count("was called and is not implemented") == words - 1 - len(named) - len(quiet)
    assert words - 1 == len(named) or f"export table {name}: slot " in outcome.err
    assert not any(f"export table {name}: slot {slot} was called" in outcome.err for slot in quiet), outcome.err


def test_small_tables(stage: Stage) -> None:
    stage.run(START + r"""
hooks = table("a094798c-2e74-2e74-93f2-0800200c0a66")
for index, size in ((2, 1024), (6, 14)):
    buffer, n = c.c_void_p(), c.c_size_t()
    assert slot(hooks, index, c.c_void_p, c.c_void_p)(c.addressof(buffer), c.addressof(n)) == 0
    assert n.value == size and c.string_at(buffer.value, 4 * size) == bytes(4 * size)  # words, which runtimes read
assert d.cuInit(0) == 0
now = c.c_void_p(1); tls = table("42d85a81-23f6-cb47-8298-f6e78a3aecdc")
assert slot(tls, 2, c.c_void_p)(c.addressof(now)) == 0 and now.value is None
interface = table("6bd5fb6c-5bf4-e74a-8987-d93912fd9df9"); primary = c.c_void_p()
assert slot(interface, 2, c.c_void_p, c.c_int)(c.addressof(primary), 0) == 0 and primary.value
assert slot(interface, 2, c.c_void_p, c.c_int)(c.addressof(primary), 1) == 101
flags, active = c.c_uint(), c.c_int(1)
assert d.cuDevicePrimaryCtxGetState(0, c.byref(flags), c.byref(active)) == 0 and active.value == 0  # the handle alone
retained = c.c_void_p()
assert d.cuDevicePrimaryCtxRetain(c.byref(retained), 0) == 0 and retained.value == primary.value
assert d.cuCtxSetCurrent(primary) == 0
assert slot(tls, 2, c.c_void_p)(c.addressof(now)) == 0 and now.value == primary.value
checks = table("263e8860-7cd2-6143-92f6-bbd5006dfa7e"); out = c.c_uint32(9)
assert slot(checks, 2, c.c_void_p, c.c_void_p, c.c_void_p)(primary, c.addressof(out), None) == 0 and out.value == 0
assert slot(checks, 3)() == 0
ident = c.c_uint64(); blas = table("21318c60-9714-3248-8ca6-41ff7324c8f2")
assert slot(blas, 4, c.c_void_p, c.c_void_p)(primary, c.addressof(ident)) == 0
other = c.c_uint64(); assert d.cuCtxGetId(primary, c.byref(other)) == 0 and other.value == ident.value > 0
""")


def test_what_cublas_asks_of_a_stream(stage: Stage) -> None:
    """Slot 51: an object for each stream, readable and zero; slot 39: zero. Nothing is said of either."""
    outcome = stage.run(START + r"""
assert d.cuInit(0) == 0
context, streams = c.c_void_p(), [c.c_void_p(), c.c_void_p()]
assert d.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and d.cuCtxSetCurrent(context) == 0
for stream in streams:
    assert d.cuStreamCreate(c.byref(stream), 1) == 0
words = table("21318c60-9714-3248-8ca6-41ff7324c8f2")
ask, value = (slot(words, index, c.c_void_p, c.c_void_p, c.c_void_p) for index in (51, 39))
def of(stream):
    out = c.c_void_p(); assert ask(context, stream, c.addressof(out)) == 0 and out.value
    assert c.string_at(out.value, 4096) == bytes(4096)
    return out.value
assert len({of(streams[0]), of(streams[1]), of(None)}) == 3 and of(streams[0]) == of(streams[0])
assert ask(context, None, None) == 1 and ask(context, 2**64 - 1, c.addressof(c.c_void_p())) == 400
number = c.c_uint64(9); assert value(context, streams[0], c.addressof(number)) == 0 and number.value == 0
assert value(context, streams[0], None) == 1
""")
    assert "export table" not in outcome.err
    outcome = stage.run(START + r"""
words = table("21318c60-9714-3248-8ca6-41ff7324c8f2")
slot(words, 51, c.c_void_p, c.c_void_p, c.c_void_p)(0x123, 0x456, None)
""", RGPU_SHIM_LOG="1")
    assert "slot 51 called with 0x123 0x456" in outcome.err


def test_functions_of_a_module(stage: Stage) -> None:
    """As cuFFT uses it: the number of functions, and a call for each."""
    stage.run(START + r"""
assert d.cuInit(0) == 0
context, module = c.c_void_p(), c.c_void_p()
assert d.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and d.cuCtxSetCurrent(context) == 0
ptx = b".version 6.4\n.target sm_75\n.address_size 64\n.visible .entry a() { ret; }\n.visible .entry b() { ret; }\n\0"
for binary, loader in ((ptx, 1), (ptx, 6), (ptx, 8)):
    words = table("6bd5fb6c-5bf4-e74a-8987-d93912fd9df9")
    load = slot(words, loader, *[c.c_void_p] * 5)
    assert (load(binary, c.addressof(module), None, None, 0) if loader == 8 else
            load(c.addressof(module), binary, None, None, 0)) == 0
seen = []
@c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_uint64)
def each(user, function, index):
    name = c.c_char_p(); assert d.cuFuncGetName(c.byref(name), c.c_void_p(function)) == 0
    seen.append((user, name.value))
words = table("6e163fbe-b958-444d-835c-e182aff1991e")
assert slot(words, 7, c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p)(context, module, each, 77) == 2
assert sorted(seen) == [(77, b"a"), (77, b"b")], seen
""")


def test_self_test_fixed_answers(stage: Stage) -> None:
    stage.run(START + r"""
assert d.cuInit(0) == 0
words = table("d4082055-bde6-704b-8d34-ba123c66e1f2"); out = (c.c_uint64 * 2)()
test = slot(words, 1, c.c_uint32, c.c_uint64, c.c_void_p)
assert test(13000, 1, out) == 0 and list(out) == [0x3341181C03CB675C, 0x8ED383AA1F4CD1E8]
assert test(13001, 1, out) == 0 and list(out) == [0x1841181C03CB675C, 0x8ED383AA1F4CD1E8]
assert test(13002, 1, out) == 0; first = list(out)
assert test(13002, 1, out) == 0 and list(out) == first
assert test(13002, 2, out) == 0 and list(out) != first
""")


def test_unknown_table_is_named_once_with_its_caller(stage: Stage) -> None:
    outcome = stage.run(r"""
import ctypes as c
d = c.CDLL("libcuda.so.1"); out = c.c_void_p(3)
assert [d.cuGetExportTable(c.byref(out), bytes(range(16))) for _ in range(3)] == [500] * 3
# known and optional: refused without a word
for text in ("f8cff95121468b4eb9e2fb469e7c0dd9", "69a28e9f24498b47b030c5da330ea4e9"):
    assert d.cuGetExportTable(c.byref(out), bytes.fromhex(text)) == 500
assert d.cuGetExportTable(None, bytes(16)) == 1 and d.cuGetExportTable(c.byref(out), None) == 1
""")
    lines = [line for line in outcome.err.splitlines() if "export table" in line]
    assert len(lines) == 1 and "000102030405060708090a0b0c0d0e0f" in lines[0] and ".so" in lines[0]
