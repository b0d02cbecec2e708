"""The tables of calls, what is generated from them, and the C++ encoders against the Python decoders."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.session.calls import decoders, generate
from rgpu.session.calls.emit.types import cuda_types
from rgpu.session.calls.emit.wire import SCALAR, camel
from rgpu.session.calls.functions import FUNCTIONS, symbols
from rgpu.session.calls.functions.model import ASYNC, LOCAL, REFUSED, SYNC, function
from rgpu.session.calls.wire import BY_ID, BY_NAME, CALLS, Answer, Arg
from rgpu.session.errors import Corrupt

GENERATED = generate.root() / "rgpu/client/shim/generated"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

VALUES = {
    "u8": st.integers(0, 255), "u16": st.integers(0, 2**16 - 1), "u32": st.integers(0, 2**32 - 1),
    "u64": st.integers(0, 2**64 - 1), "i32": st.integers(-2**31, 2**31 - 1), "i64": st.integers(-2**63, 2**63 - 1),
    "f32": st.floats(width=32, allow_nan=False), "f64": st.floats(allow_nan=False), "blob": st.binary(max_size=40),
}


def _value(arg: Arg) -> st.SearchStrategy[object]:
    return VALUES.get(arg.type, VALUES["u64"])


# -- tables -----------------------------------------------------------------------
def test_what_is_generated_is_up_to_date() -> None:
    assert generate.stale(generate.root()) == [], "run python -m rgpu.session.calls.generate"


def test_check_names_what_is_stale(tmp_path: Path) -> None:
    assert sorted(generate.write(tmp_path)) == sorted(generate.OUTPUTS)
    assert generate.stale(tmp_path) == []
    (tmp_path / "docs/users/errors.md").write_text("edited by hand")
    assert generate.stale(tmp_path) == ["docs/users/errors.md"]


def test_every_exported_name_is_in_the_tables_once() -> None:
    names = [name for entry in FUNCTIONS.values() for name in entry.symbols]
    assert len(names) == len(set(names)) == 674
    assert tuple(sorted(names)) == symbols()


def test_entries_make_sense() -> None:
    for entry in FUNCTIONS.values():
        assert entry.answer in (LOCAL, ASYNC, SYNC, REFUSED)
        assert all(name in BY_NAME for name in entry.calls), entry.symbol
        assert entry.calls or entry.answer in (LOCAL, REFUSED), entry.symbol
        assert entry.arguments is not None or not entry.implemented, entry.symbol
        if entry.answer == SYNC:
            assert any(BY_NAME[name].answer is not Answer.ASYNC for name in entry.calls), entry.symbol
        if entry.answer == ASYNC and entry.hand_written:
            assert all(BY_NAME[name].answer is Answer.ASYNC or name == "host_function" for name in entry.calls)
        if entry.alias:
            target = FUNCTIONS[entry.alias]
            assert [p.rpartition(" ")[0] for p in entry.parameters] == [p.rpartition(" ")[0] for p in target.parameters]
        assert len(set(entry.parameter_names)) == len(entry.parameter_names)


def test_every_wire_call_is_used_by_a_function() -> None:
    used = {name for entry in FUNCTIONS.values() for name in entry.calls}
    internal = {"session_open", "host_mirror_write", "host_mirror_read", "host_word_write",
                "timed"}  # around others
    nccl = {"communicator_create", "communicator_destroy", "collective_group"}  # rgpu/client/nccl
    assert {call.name for call in CALLS} - used == internal | nccl


def test_call_ids_are_for_ever() -> None:
    """Ids are append-only: this list only ever grows at its end."""
    assert [call.name for call in CALLS][:39] == (
        "session_open completed context_create context_destroy context_limit context_flags context_synchronize "
        "memory_map memory_unmap memory_allocate memory_free memory_free_wait memset memcpy_h2d memcpy_d2h memcpy_d2d "
        "memcpy2d_h2d memcpy2d_d2h memcpy2d_d2d module_load module_unload function_attribute launch stream_create "
        "stream_destroy stream_synchronize stream_wait_event event_create event_destroy event_record "
        "event_synchronize event_elapsed host_function host_function_done host_allocate host_free link "
        "host_mirror_write host_mirror_read").split()
    ids = [call.id for call in CALLS]
    assert ids == sorted(set(ids)) and ids[:39] == list(range(1, 40))
    assert BY_ID[70].name == "function_load"


@pytest.mark.parametrize("known", ["cuX", "cuX 1 ptsz", "cuX 1 both 2", "cuX one"])
def test_unreadable_entries(known: str) -> None:
    with pytest.raises(ValueError):
        function("cuX", "", known)


def _typedefs() -> dict[tuple[str, int, str], int]:
    """(base, version, variant) → number of parameters, from NVIDIA's own header if it is installed."""
    spec = pytest.importorskip("nvidia.cu13", reason="needs the headers of nvidia-cuda-runtime")
    text = (Path(next(iter(spec.__path__))) / "include/cudaTypedefs.h").read_text()
    found = {}
    for match in re.finditer(r"\*PFN_(cu\w+?)_v(\d+)(?:_(ptds|ptsz))?\)\((.*?)\);", text):
        base, version, variant, parameters = match.groups()
        found[base, int(version), variant or ""] = 0 if parameters == "void" else parameters.count(",") + 1
    return found


def test_versions_are_those_of_the_public_header() -> None:
    ours = {}
    for entry in FUNCTIONS.values():
        if entry.base:
            ours[entry.base, entry.version, ""] = len(entry.parameters)
            if entry.per_thread:
                ours[entry.base, entry.per_thread.version, entry.per_thread.suffix[1:]] = len(entry.parameters)
    theirs = _typedefs()
    assert len(theirs) > 500
    assert {key: count for key, count in theirs.items() if ours.get(key) != count} == {}


def test_a_name_asked_for_at_its_versions() -> None:
    def at(base: str) -> dict[int, str]:
        return {entry.version: entry.symbol for entry in FUNCTIONS.values() if entry.base == base}

    assert at("cuMemAlloc") == {2000: "cuMemAlloc", 3020: "cuMemAlloc_v2"}
    assert at("cuCtxCreate") == {2000: "cuCtxCreate", 3020: "cuCtxCreate_v2", 11040: "cuCtxCreate_v3",
                                 12050: "cuCtxCreate_v4"}
    assert at("cuGetProcAddress") == {11030: "cuGetProcAddress", 12000: "cuGetProcAddress_v2"}
    assert at("cuStreamGetCaptureInfo") == {10010: "cuStreamGetCaptureInfo", 11030: "cuStreamGetCaptureInfo_v2",
                                            12030: "cuStreamGetCaptureInfo_v3"}


# -- Python encoding --------------------------------------------------------------
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@given(data=st.data())
def test_python_round_trip(call, data) -> None:  # type: ignore[no-untyped-def]
    values = {arg.name: data.draw(_value(arg), label=arg.name) for arg in call.args}
    encoded = decoders.encode_args(call.name, **values)
    decoded = decoders.decode(call.id, memoryview(encoded))
    assert decoded._asdict() == values and type(decoded).__name__ == camel(call.name)
    with pytest.raises(Corrupt):
        decoders.decode(call.id, encoded + b"\0")
    if encoded:
        cut = data.draw(st.integers(0, len(encoded) - 1))
        with pytest.raises(Corrupt):
            decoders.decode(call.id, encoded[:cut])


@given(st.integers(0, 70), st.binary(max_size=120))
def test_random_arguments_decode_or_are_corrupt(call_id: int, data: bytes) -> None:
    try:
        found = decoders.decode(call_id, memoryview(data))
    except Corrupt as error:
        assert error.detail["reason"]
    else:
        assert decoders.encode_args(call_id, **found._asdict()) == data


@pytest.mark.parametrize("call", [c for c in CALLS if c.reply], ids=lambda call: call.name)
@given(data=st.data())
def test_replies(call, data) -> None:  # type: ignore[no-untyped-def]
    values = {arg.name: data.draw(_value(arg)) for arg in call.reply}
    encoded = decoders.encode_reply(call, **values)
    assert encoded == decoders.encode_reply(call.name, **values) == decoders.encode_reply(call.id, **values)
    assert decoders.decode_reply(call, encoded)._asdict() == values
    with pytest.raises(Corrupt):
        decoders.decode_reply(call, encoded[:-1])


def test_misuse() -> None:
    assert decoders.encode_reply("memset") == b"" and decoders.decode_reply("memset", b"") is None
    with pytest.raises(Corrupt):
        decoders.decode_reply("memset", b"x")
    with pytest.raises(TypeError):
        decoders.encode_reply("memset", value=1)
    with pytest.raises(TypeError):
        decoders.encode_args("completed")
    with pytest.raises(TypeError):
        decoders.encode_args("completed", observed=1, more=2)
    with pytest.raises(ValueError):
        decoders.encode_args("completed", observed=-1)
    with pytest.raises(Corrupt):
        decoders.decode(999, b"")


# -- C++ ----------------------------------------------------------------------------
def _literal(kind: str, index: int) -> tuple[str, object]:
    """(C++ literal, the Python value) of a value that shows swapped or truncated fields."""
    if kind == "blob":
        text = f"blob-{index}" * (index % 3)
        return f'rgpu::wire::Blob{{"{text}", {len(text)}}}', text.encode()
    size = SCALAR[kind][1]
    if kind == "f32":
        return f"{index}.25f", index + 0.25
    if kind == "i32":
        return f"{-index - 1}", -index - 1
    value = int.from_bytes(bytes((17 * index + 5 + n) % 256 for n in range(size)), "little")
    return f"{value:#x}" + ("ull" if size == 8 else ""), value


def _program() -> tuple[str, list[tuple[str, dict[str, object]]]]:
    lines, wanted = [], []
    for call in CALLS:
        literals = [(arg.name, *_literal(arg.type, n)) for n, arg in enumerate(call.args)]
        lines.append(f"  {{ rgpu::wire::{camel(call.name)} c; static_assert(c.id == {call.id});")
        lines += [f"    c.{name} = {text};" for name, text, _ in literals]
        lines.append("    out(c); }")
        wanted.append((call.name, {name: value for name, _, value in literals}))
    for call in CALLS:
        if call.reply:
            lines.append(f"  {{ rgpu::wire::{camel(call.name)}Reply r; reply(r, [&] {{")
            lines += [f"    show(r.{arg.name});" for arg in call.reply]
            lines.append("  }); }")
    return """#include <cstdio>
#include <vector>
#include "wire.hpp"
template <class C> void out(const C &c) {
  std::vector<uint8_t> bytes(c.args_size() + 1, 0xEE);
  c.write(bytes.data());
  if (bytes.back() != 0xEE) { printf("overrun in %s\\n", C::name); return; }
  printf("%u", C::id);
  for (size_t n = 0; n + 1 < bytes.size(); n++) printf("%s%02x", n ? "" : " ", bytes[n]);
  printf("\\n");
}
void show(const rgpu::wire::Blob &b) { printf("%.*s;", (int)b.size, (const char *)b.data); }
void show(float f) { printf("%g;", f); }
template <class R, class F> void reply(R &r, F shown) {
  static std::vector<uint8_t> data;
  unsigned size = 0;
  if (scanf("%u", &size) != 1) return;
  data.resize(size);
  for (auto &byte : data) { unsigned b = 0; if (scanf("%2x", &b) != 1) return; byte = (uint8_t)b; }
  bool all = r.read(data.data(), size);
  for (unsigned cut = 0; cut < size; cut++) {
    std::vector<uint8_t> part(data.begin(), data.begin() + cut);
    R other; if (other.read(part.data(), cut)) printf("took %u of %u;", cut, size);
  }
  std::vector<uint8_t> more(data); more.push_back(0);
  R other; if (other.read(more.data(), size + 1)) printf("took too much;");
  r.read(data.data(), size);
  printf("%d:", all); shown(); printf("\\n");
}
int main() {
""" + "\n".join(lines) + "\n}\n", wanted


@needs_compiler
def test_cpp_encoders_against_python_decoders(tmp_path: Path) -> None:
    program, wanted = _program()
    (tmp_path / "t.cpp").write_text(program)
    subprocess.run(["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-I",
                    str(GENERATED), str(tmp_path / "t.cpp"), "-o", str(tmp_path / "t")], check=True)
    replies = [
        decoders.encode_reply("module_load", table=b"a-table", log=b"a-log"),
        decoders.encode_reply("event_elapsed", milliseconds=1.5),
        decoders.encode_reply("link", image=b"image", log=b""),
    ]
    given_in = "".join(f"{len(data)} {data.hex()}\n" for data in replies)
    ran = subprocess.run([str(tmp_path / "t")], input=given_in, capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    for (name, values), line in zip(wanted, lines, strict=False):
        call_id, _, data = line.partition(" ")
        assert decoders.decode(int(call_id), bytes.fromhex(data))._asdict() == values, name
        assert bytes.fromhex(data) == decoders.encode_args(name, **values)
    assert lines[len(wanted):] == ["1:a-table;a-log;", "1:1.5;", "1:image;;"]


@needs_compiler
def test_exports_compile_and_look_up(tmp_path: Path) -> None:
    """exports.cpp alone, with every hand-written function stubbed: order of the names, variants, refusal."""
    stubs = "".join(f"RGPU_API CUresult {e.symbol}({e.arguments or 'void'}) "
                    f"{{ return rgpu::per_thread_default_stream ? CUresult({7000 + n}) : CUresult({5000 + n}); }}\n"
                    for n, e in enumerate(FUNCTIONS.values()) if e.hand_written)
    number = {e.symbol: n for n, e in enumerate(FUNCTIONS.values())}
    (tmp_path / "t.cpp").write_text(
        '#include <cstdio>\n#include "api.hpp"\nextern "C" {\n' + stubs + '}\n'
        'void rgpu::log_unsupported(const char *name) { printf("%s\\n", name); }\n'
        'extern "C" CUresult cuGraphAddExternalSemaphoresSignalNode();\n'
        'int main() {\n  printf("%d\\n", cuGraphAddExternalSemaphoresSignalNode());\n'
        '  for (size_t n = 1; n < rgpu::kProcTableSize; n++) {\n'
        '    auto before = rgpu::kProcTable[n - 1].base;\n'
        '    if (__builtin_strcmp(before, rgpu::kProcTable[n].base) > 0) printf("unsorted\\n"); }\n'
        '  printf("%d %d %d\\n", cuMemcpyHtoD_v2_ptds(1, nullptr, 2), cuMemcpyHtoD_v2(1, nullptr, 2),\n'
        '         cuCtxDestroy(nullptr));\n}\n')
    subprocess.run(["g++", "-std=c++20", "-Wall", "-Wextra", "-Wno-unused-parameter", "-I", str(GENERATED),
                    str(tmp_path / "t.cpp"), str(GENERATED / "exports.cpp"), "-o", str(tmp_path / "t")], check=True)
    ran = subprocess.run([str(tmp_path / "t")], capture_output=True, text=True, check=True)
    copy = number["cuMemcpyHtoD_v2"]
    assert ran.stdout.splitlines() == [
        "cuGraphAddExternalSemaphoresSignalNode", "801",
        f"{7000 + copy} {5000 + copy} {5000 + number['cuCtxDestroy_v2']}"]


@needs_compiler
def test_types_have_the_layout_of_the_public_header(tmp_path: Path) -> None:
    """Sizes and offsets against NVIDIA's cuda.h, where it is installed."""
    spec = pytest.importorskip("nvidia.cu13", reason="needs the headers of nvidia-cuda-runtime")
    include = Path(next(iter(spec.__path__))) / "include"
    (tmp_path / "ours.hpp").write_text("namespace ours {\n" + cuda_types().replace("#pragma once\n", "")
                                       .replace("#include <cstddef>\n#include <cstdint>\n", "") + "}\n")
    checks = [f"static_assert(sizeof(ours::{name}) == sizeof(::{name}));" for name in (
        "CUDA_MEMCPY2D", "CUDA_MEMCPY3D", "CUDA_MEMCPY3D_PEER", "CUlaunchAttribute", "CUlaunchConfig", "CUdevprop",
        "CUmemPoolProps", "CUctxCreateParams", "CUexecAffinityParam", "CUgraphEdgeData", "CUlaunchAttributeValue",
        "CUDA_ARRAY_DESCRIPTOR", "CUDA_ARRAY3D_DESCRIPTOR", "CUDA_ARRAY_MEMORY_REQUIREMENTS", "CUDA_RESOURCE_DESC",
        "CUDA_TEXTURE_DESC", "CUDA_RESOURCE_VIEW_DESC")]
    checks += [f"static_assert(offsetof(ours::{name}, {field}) == offsetof(::{name}, {field}));" for name, field in (
        ("CUDA_MEMCPY2D", "dstPitch"), ("CUDA_MEMCPY3D", "srcHeight"), ("CUDA_MEMCPY3D", "Depth"),
        ("CUDA_MEMCPY3D_PEER", "dstContext"), ("CUlaunchConfig", "numAttrs"), ("CUlaunchAttribute", "value"),
        ("CUmemPoolProps", "usage"), ("CUctxCreateParams", "cigParams"),
        ("CUDA_ARRAY3D_DESCRIPTOR", "Flags"), ("CUDA_RESOURCE_DESC", "res.pitch2D.pitchInBytes"),
        ("CUDA_TEXTURE_DESC", "borderColor"), ("CUDA_RESOURCE_VIEW_DESC", "lastLayer"))]
    members = re.findall(r"^    (C[UI]\w+) = (-?\w+),$", cuda_types(), re.M)
    assert len(members) > 400
    checks += [f"static_assert((long)ours::{name} == (long)::{name});" for name, _ in members
               if name != "CU_LAUNCH_ATTRIBUTE_MAX"]  # hidden in the header
    (tmp_path / "t.cpp").write_text('#include <cstddef>\n#include <cstdint>\n#include "ours.hpp"\n#include "cuda.h"\n'
                                    + "\n".join(checks))
    # ours first: cuda.h makes macros of some names
    subprocess.run(["g++", "-std=c++20", "-fsyntax-only", "-I", str(include), str(tmp_path / "t.cpp")], check=True)


def test_structs_pack_like_the_python_formats() -> None:
    """The record header of wire.hpp and of record.py are one."""
    from rgpu.session.journal.record import HEADER, HEADER_SIZE, MAGIC, MAX_ARGS, MAX_PAYLOAD

    text = (GENERATED / "wire.hpp").read_text()
    assert f"kRecordMagic = {MAGIC:#010X}".replace("0X", "0x") in text
    assert f"sizeof(RecordHeader) == {HEADER_SIZE}" in text and HEADER_SIZE == struct.calcsize(HEADER.format)
    assert (MAX_ARGS, MAX_PAYLOAD) == (1 << 20, 1 << 34)
    assert "kMaxArgs = 1u << 20" in text and "kMaxPayload = 1ull << 34" in text


def test_error_sentences_are_those_of_the_stock_runtime() -> None:
    import ctypes

    from rgpu.session.calls.types.results import RESULTS

    spec = pytest.importorskip("nvidia.cu13", reason="needs nvidia-cuda-runtime")
    found = list((Path(next(iter(spec.__path__))) / "lib").glob("libcudart.so*"))
    if not found:
        pytest.skip("no libcudart")
    text_of = ctypes.CDLL(str(found[0])).cudaGetErrorString
    text_of.restype = ctypes.c_char_p
    theirs = {value: text_of(value).decode() for value in RESULTS}
    assert {v: text for v, text in theirs.items() if text != RESULTS[v][1]} == {
        202: "unrecognized error code", 916: "unrecognized error code"}
