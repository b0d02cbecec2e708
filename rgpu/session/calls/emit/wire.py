"""Generator of wire.hpp: the wire calls and the record, for C++."""

from __future__ import annotations

from rgpu.session import addresses
from rgpu.session.calls.emit.types import BANNER
from rgpu.session.calls.wire import CALLS, FIRST_HANDLE, LEGACY_STREAM, Answer, Arg, Call

#: type in the tables → (C++ type, bytes)
SCALAR: dict[str, tuple[str, int]] = {
    "u8": ("uint8_t", 1), "u16": ("uint16_t", 2), "u32": ("uint32_t", 4), "u64": ("uint64_t", 8),
    "i32": ("int32_t", 4), "i64": ("int64_t", 8), "f32": ("float", 4), "f64": ("double", 8),
    **{name: ("uint64_t", 8) for name in ("addr", "context", "stream", "event", "module")},
}

_RECORD = """// The journal record (docs/developers/journal.md).
inline constexpr uint32_t kRecordMagic = 0x4C434752;
inline constexpr uint16_t kFlagExternal = 1;
inline constexpr uint16_t kFlagAwaited = 2;
inline constexpr uint32_t kMaxArgs = 1u << 20;
inline constexpr uint64_t kMaxPayload = 1ull << 34;

struct RecordHeader {
    uint32_t magic;
    uint16_t call;
    uint16_t flags;
    uint64_t seq;
    uint32_t thread;
    uint32_t args_len;
    uint64_t payload_len;
    uint32_t payload_crc;
    uint32_t crc;  // of bytes 0..35 with EXTERNAL cleared, then of the arguments
};
static_assert(sizeof(RecordHeader) == 40);
inline constexpr size_t kCrcCovered = 36;

struct ExternalPayload {  // in the payload's place, with EXTERNAL
    uint32_t segment;
    uint32_t zero;
    uint64_t offset;
};
static_assert(sizeof(ExternalPayload) == 16);

inline constexpr uint64_t padded(uint64_t size) { return (size + 7) & ~uint64_t{7}; }

"""

_BLOB = """struct Blob {
    const void *data = nullptr;
    uint32_t size = 0;
};

"""

_GET = """template <typename T>
inline bool get(const uint8_t *&at, const uint8_t *end, T &value) {
    if (static_cast<size_t>(end - at) < sizeof value) return false;
    memcpy(&value, at, sizeof value);
    at += sizeof value;
    return true;
}

inline bool get(const uint8_t *&at, const uint8_t *end, Blob &blob) {
    if (!get(at, end, blob.size) || static_cast<size_t>(end - at) < blob.size) return false;
    blob.data = at;
    at += blob.size;
    return true;
}

"""

_HEAD = """#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rgpu {

// Address ranges of a session (rgpu/session/addresses.py).
@ADDRESSES@
namespace wire {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are little-endian");

@RECORD@inline constexpr uint64_t kLegacyStream = @LEGACY@;
inline constexpr uint64_t kFirstHandle = @FIRST@;

@BLOB@namespace detail {

template <typename T>
inline void put(uint8_t *&out, T value) {
    memcpy(out, &value, sizeof value);
    out += sizeof value;
}

inline void put(uint8_t *&out, const Blob &blob) {
    put(out, blob.size);
    if (blob.size) memcpy(out, blob.data, blob.size);
    out += blob.size;
}

@GET@}  // namespace detail

"""


def camel(name: str) -> str:
    """Turn ``memcpy_h2d`` into ``MemcpyH2d``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _cpp_type(arg: Arg) -> str:
    return "Blob" if arg.type == "blob" else SCALAR[arg.type][0]


def struct_fields(args: tuple[Arg, ...]) -> str:
    """Make the C++ fields of a call's arguments, one a line."""
    return "".join(f"    {_cpp_type(arg)} {arg.name}{{}};\n" for arg in args)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _call(call: Call) -> str:
    fixed = sum(SCALAR[arg.type][1] for arg in call.args if arg.type != "blob")
    blobs = [arg.name for arg in call.args if arg.type == "blob"]
    size = " + ".join([str(fixed)] + [f"4 + size_t{{{name}.size}}" for name in blobs])
    writes = "".join(f"        detail::put(out, {arg.name});\n" for arg in call.args)
    flags = {
        "awaited": call.answer is not Answer.ASYNC, "reserved": call.reserved, "volatile_answer": call.volatile,
        "has_payload": call.payload, "has_reply_payload": call.reply_payload,
    }
    return (
        f"struct {camel(call.name)} {{\n{struct_fields(call.args)}"
        f"    static constexpr uint16_t id = {call.id};\n"
        f'    static constexpr const char *name = "{call.name}";\n'
        + "".join(f"    static constexpr bool {name} = {_flag(value)};\n" for name, value in flags.items())
        + f"    size_t args_size() const {{ return {size}; }}\n"
        + (f"    void write(uint8_t *out) const {{\n{writes}    }}\n" if call.args
           else "    void write(uint8_t *) const {}\n")
        + "};\n\n"
    )


def _reader(name: str, args: tuple[Arg, ...]) -> str:
    reads = " && ".join(f"detail::get(at, end, {arg.name})" for arg in args)
    return (
        f"struct {name} {{\n{struct_fields(args)}"
        "    // False unless the bytes are exactly this; blobs point into them.\n"
        "    bool read(const uint8_t *data, size_t size) {\n"
        "        const uint8_t *at = data;\n        const uint8_t *end = data + size;\n"
        f"        return {reads} && at == end;\n    }}\n}};\n\n"
    )


def _addresses() -> str:
    names = ("DEVICE_BASE", "DEVICE_STRIDE", "ALLOCATION_SIZE", "GLOBALS_OFFSET", "GLOBALS_SIZE", "PINNED_BASE",
             "PINNED_SIZE", "PINNED_FIRST", "GRANULE", "ALIGNMENT", "PAGE", "SESSION_DEVICES")
    return "".join(f"inline constexpr uint64_t k{camel(name.lower())} = {getattr(addresses, name):#x};\n"
                   for name in names)


def record_layout() -> str:
    """Make the record's layout and the helpers of decoders, without the shim's shared memory."""
    return f"{_RECORD}{_BLOB}namespace detail {{\n\n{_GET}}}  // namespace detail\n\n"


def wire_header() -> str:
    """Make the text of wire.hpp."""
    head = (_HEAD.replace("@RECORD@", _RECORD).replace("@BLOB@", _BLOB).replace("@GET@", _GET)
            .replace("@ADDRESSES@", _addresses()).replace("@LEGACY@", str(LEGACY_STREAM))
            .replace("@FIRST@", str(FIRST_HANDLE)))
    body = "".join(_call(call) + (_reader(camel(call.name) + "Reply", call.reply) if call.reply else "")
                   for call in CALLS)
    names = "".join(f'        case {call.id}: return "{call.name}";\n' for call in CALLS)
    return (BANNER + head + body + "inline const char *call_name(uint16_t id) {\n    switch (id) {\n" + names
            + "        default: return \"?\";\n    }\n}\n\n}  // namespace wire\n}  // namespace rgpu\n")
