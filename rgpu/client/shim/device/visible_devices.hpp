// CUDA_VISIBLE_DEVICES, as driver 580 reads it (tests/client/shim/handshake/native_580.json, "visible").
//
// A list of indices and "GPU-" UUID prefixes, separated by commas. The first entry that names no device ends the list;
// the entries before it count. A device named twice makes cuInit fail with CUDA_ERROR_INVALID_DEVICE.
#pragma once

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace rgpu {

using Uuid = std::array<std::uint8_t, 16>;

// The text "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", in lower case.
inline std::string uuid_text(const Uuid& uuid) {
    static constexpr char kHex[] = "0123456789abcdef";
    std::string text = "GPU-";
    for (std::size_t i = 0; i < uuid.size(); ++i) {
        if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
        text += kHex[uuid[i] >> 4];
        text += kHex[uuid[i] & 15];
    }
    return text;
}

struct Visible {
    std::vector<int> ordinals;  // of the session's devices, in the program's order
    bool repeated = false;      // a device was named twice
};

namespace detail {

// The device that one entry names: an index as strtol reads it, or a prefix of exactly one UUID.
inline std::optional<int> visible_entry(const std::string& entry, const std::vector<Uuid>& devices) {
    std::size_t start = entry.find_first_not_of(" \t");
    if (start == std::string::npos) return std::nullopt;
    std::string word = entry.substr(start);
    while (!word.empty() && std::isspace(static_cast<unsigned char>(word.back()))) word.pop_back();
    if (word.size() > 4 && word.compare(0, 4, "GPU-") == 0) {
        std::transform(word.begin() + 4, word.end(), word.begin() + 4,
                       [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
        std::optional<int> found;
        for (std::size_t i = 0; i < devices.size(); ++i) {
            if (uuid_text(devices[i]).compare(0, word.size(), word) != 0) continue;
            if (found) return std::nullopt;  // ambiguous
            found = static_cast<int>(i);
        }
        return found;
    }
    char* end = nullptr;
    const long index = std::strtol(word.c_str(), &end, 0);
    if (end == word.c_str() || index < 0 || index >= static_cast<long>(devices.size())) return std::nullopt;
    return static_cast<int>(index);
}

}  // namespace detail

// `value`: the variable, or nullptr when it is not set (every device is visible).
inline Visible visible_devices(const char* value, const std::vector<Uuid>& devices) {
    Visible out;
    if (value == nullptr) {
        for (std::size_t i = 0; i < devices.size(); ++i) out.ordinals.push_back(static_cast<int>(i));
        return out;
    }
    std::string_view rest = value;
    while (true) {
        const std::size_t comma = rest.find(',');
        const auto ordinal = detail::visible_entry(std::string(rest.substr(0, comma)), devices);
        if (!ordinal) break;
        if (std::find(out.ordinals.begin(), out.ordinals.end(), *ordinal) != out.ordinals.end()) {
            out.repeated = true;
            break;
        }
        out.ordinals.push_back(*ordinal);
        if (comma == std::string_view::npos) break;
        rest.remove_prefix(comma + 1);
    }
    return out;
}

}  // namespace rgpu
