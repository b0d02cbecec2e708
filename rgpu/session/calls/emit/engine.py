"""Generator of hot_calls.hpp: the record and the decoders of the hot calls, for the native engine of a device."""

from __future__ import annotations

from rgpu.session.calls.emit.types import BANNER
from rgpu.session.calls.emit.wire import camel, record_layout, struct_fields
from rgpu.session.calls.hot import HOT
from rgpu.session.calls.wire import BY_NAME, CALLS, FIRST_HANDLE, Answer, Call

_HEAD = """#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rgpu {
namespace wire {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are little-endian");

// Numbers below are of legacy streams.
inline constexpr uint64_t kFirstHandle = @FIRST@;

"""


def _decoder(call: Call) -> str:
    reads = " && ".join(f"detail::get(at, end, {arg.name})" for arg in call.args)
    return (
        f"struct {camel(call.name)} {{\n{struct_fields(call.args)}"
        f"    static constexpr uint16_t id = {call.id};\n"
        "    // False unless the bytes are exactly this; blobs point into them.\n"
        "    bool read(const uint8_t *raw, size_t raw_size) {\n"
        "        const uint8_t *at = raw;\n        const uint8_t *end = raw + raw_size;\n"
        f"        return {reads} && at == end;\n    }}\n}};\n\n"
    )


def _switch(name: str, doc: str, calls: list[Call]) -> str:
    cases = "".join(f"        case {call.id}:  // {call.name}\n" for call in calls)
    return (f"// {doc}\ninline bool {name}(uint16_t id) {{\n    switch (id) {{\n{cases}            return true;\n"
            "        default: return false;\n    }\n}\n\n")


def hot_calls() -> str:
    """Make the text of hot_calls.hpp."""
    head = _HEAD.replace("@FIRST@", str(FIRST_HANDLE))
    return (BANNER + head + record_layout() + "".join(_decoder(call) for call in (*HOT, BY_NAME["timed"]))
            + _switch("hot", "Applied by the engine itself.", list(HOT))
            + _switch("awaited", "The program waits for the answer.",
                      [call for call in CALLS if call.answer is not Answer.ASYNC])
            + "}  // namespace wire\n}  // namespace rgpu\n")
