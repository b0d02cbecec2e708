#include "slim.hpp"

#include <algorithm>
#include <cstring>

namespace rgpu::module_binary {
namespace {

constexpr std::uint64_t k64Bit = 1;
constexpr std::uint64_t kThisArchitectureOnly = 1 << 20;
constexpr std::uint64_t kThisFamilyOnly = 1 << 21;
constexpr std::size_t kHeaderSizeOffset = 6, kSizeOffset = 8;  // in the fat binary's header

enum class Fit { no, maybe, sure };

bool is(const Entry& entry, Entry::Code code) { return entry.kind == static_cast<std::uint16_t>(code); }

// Whether the target can run this PTX or machine code.
Fit fit(const Entry& entry, const Target& target) {
    const auto device = static_cast<std::uint32_t>(target.major * 10 + target.minor);
    const bool machine_code = is(entry, Entry::Code::elf);
    if (machine_code && (target.only_ptx || entry.architecture / 10 != device / 10)) return Fit::no;
    if (entry.architecture > device) return Fit::no;
    if ((entry.flags & k64Bit) == 0) return Fit::maybe;
    const bool plain = (entry.flags & (kThisArchitectureOnly | kThisFamilyOnly)) == 0;
    return plain || entry.architecture == device ? Fit::sure : Fit::maybe;
}

// The highest architecture of a kind that certainly runs; 0: none does.
std::uint32_t best(const std::vector<Entry>& all, const Target& target, Entry::Code code) {
    std::uint32_t highest = 0;
    for (const Entry& entry : all) {
        if (is(entry, code) && fit(entry, target) == Fit::sure) highest = std::max(highest, entry.architecture);
    }
    return highest;
}

// The entries to keep, in their order. An entry that may run is kept beside one that certainly does, where the driver
// might prefer it.
std::vector<Entry> useful(const std::vector<Entry>& all, const Target& target) {
    const std::uint32_t code = best(all, target, Entry::Code::elf);
    const std::uint32_t ptx = best(all, target, Entry::Code::ptx);
    const bool compile = code == 0 || target.only_ptx || target.force_ptx;
    std::vector<Entry> kept;
    bool runs = false;
    for (const Entry& entry : all) {
        const bool machine_code = is(entry, Entry::Code::elf);
        if (machine_code || is(entry, Entry::Code::ptx)) {
            if (fit(entry, target) == Fit::no || entry.architecture < (machine_code ? code : ptx)) continue;
            if (!machine_code && !compile) continue;
            runs = true;
        }
        kept.push_back(entry);
    }
    return runs ? kept : all;
}

}  // namespace

std::string slim(const Binary& binary, const Target& target) {
    const auto all = entries(binary);
    const auto kept = useful(all, target);
    if (kept.size() == all.size()) return {};
    const auto* bytes = static_cast<const char*>(binary.data);
    std::uint16_t header_size = 0;
    std::memcpy(&header_size, bytes + kHeaderSizeOffset, sizeof header_size);
    std::uint64_t size = 0;
    for (const Entry& entry : kept) size += entry.length;
    std::string made;
    made.reserve(header_size + size);
    made.assign(bytes, header_size);
    std::memcpy(made.data() + kSizeOffset, &size, sizeof size);
    for (const Entry& entry : kept) made.append(bytes + entry.offset, entry.length);
    return made;
}

}  // namespace rgpu::module_binary
