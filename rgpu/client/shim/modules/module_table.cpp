#include "module_table.hpp"

#include <cstring>

namespace rgpu::table {
namespace {

// Reads scalars in order; after a read past the end it stays failed and returns zeros.
class Reader {
public:
    Reader(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    template <typename T>
    T get() {
        T value{};
        if (failed_ || size_ - at_ < sizeof value) {
            failed_ = true;
            return value;
        }
        std::memcpy(&value, data_ + at_, sizeof value);
        at_ += sizeof value;
        return value;
    }

    std::string name() {
        const auto length = get<std::uint16_t>();
        if (failed_ || size_ - at_ < length) {
            failed_ = true;
            return {};
        }
        std::string text(reinterpret_cast<const char*>(data_ + at_), length);
        at_ += length;
        return text;
    }

    // Whether the remaining bytes can hold `count` items of at least `least` bytes.
    bool room(std::uint64_t count, std::size_t least) const { return !failed_ && count <= (size_ - at_) / least; }
    bool failed() const { return failed_; }
    bool ended() const { return at_ == size_; }
    std::size_t at() const { return at_; }

private:
    const std::uint8_t* data_;
    std::size_t size_;
    std::size_t at_ = 0;
    bool failed_ = false;
};

constexpr std::size_t kParameter = 8, kAttributes = 64;
constexpr std::size_t kLeastFunction = 2 + 4 + kAttributes, kLeastGlobal = 2 + 16;

const char* read_function(Reader& in, FunctionRow* row) {
    row->name = in.name();
    const auto parameters = in.get<std::uint32_t>();
    if (!in.room(parameters, kParameter)) return "more parameters than bytes";
    row->parameters.reserve(parameters);
    for (std::uint32_t i = 0; i < parameters; ++i) {
        const auto offset = in.get<std::uint32_t>();
        const auto size = in.get<std::uint32_t>();
        if (std::uint64_t{offset} + size > 65536) return "a parameter outside of any parameter space";
        row->parameters.emplace_back(offset, size);
    }
    for (auto& attribute : row->attributes) attribute = in.get<std::int32_t>();
    return in.failed() ? "ends inside a function" : nullptr;
}

const char* read_all(Reader& in, Table* out) {
    const auto functions = in.get<std::uint32_t>();
    if (!in.room(functions, kLeastFunction)) return "more functions than bytes";
    out->functions.resize(functions);
    for (FunctionRow& row : out->functions) {
        if (const char* reason = read_function(in, &row)) return reason;
    }
    const auto globals = in.get<std::uint32_t>();
    if (!in.room(globals, kLeastGlobal)) return "more variables than bytes";
    out->globals.resize(globals);
    for (GlobalRow& row : out->globals) {
        row.name = in.name();
        row.address = in.get<std::uint64_t>();
        row.size = in.get<std::uint64_t>();
        row.managed = row.size >> 63;
        row.size &= ~(std::uint64_t{1} << 63);
        if (in.failed()) return "ends inside a variable";
    }
    return in.ended() ? nullptr : "bytes behind its end";
}

}  // namespace

const char* decode(const std::uint8_t* data, std::size_t size, Table* out, std::size_t* offset) {
    Reader in(data, size);
    *out = {};
    const char* reason = read_all(in, out);
    *offset = in.at();
    return reason;
}

}  // namespace rgpu::table
