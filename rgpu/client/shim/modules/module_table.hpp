// The module table: functions and variables in a load's answer (docs/developers/modules.md, "Module table").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace rgpu::table {

struct FunctionRow {
    std::string name;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> parameters;  // (offset, size), bytes
    std::array<std::int32_t, 16> attributes;                         // CUfunction_attribute 0…15, -1 unknown
};

struct GlobalRow {
    std::string name;
    std::uint64_t address, size;
    bool managed = false;
};

struct Table {
    std::vector<FunctionRow> functions;
    std::vector<GlobalRow> globals;
};

// Decodes the table. Returns nullptr, or the reason why the bytes are not a table; `offset` is the position of the
// error. Nothing is allocated for a count that the bytes cannot hold.
const char* decode(const std::uint8_t* data, std::size_t size, Table* out, std::size_t* offset);

}  // namespace rgpu::table
