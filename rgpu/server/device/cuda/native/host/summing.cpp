#include "summing.hpp"

#include "crc32.hpp"
#include "helpers.hpp"

#include <algorithm>
#include <array>

namespace rgpu {

namespace {
constexpr uint32_t kPolynomial = 0xEDB88320u;
constexpr uint32_t kOne = 0x80000000u;  // x^0, in reflected bit order
constexpr size_t kShare = 256 * 1024;   // bytes for which waking a thread pays
constexpr unsigned kHelpers = 3;        // RGPU_SUM_THREADS can lower it

// The product of two polynomials modulo the CRC's.
constexpr uint32_t times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = kOne; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);
    }
    return product;
}

// x^8, x^16, x^32 …: factors of a message's remainder for so many bytes behind it, for each power of two.
constexpr auto make_powers() {
    std::array<uint32_t, 64> powers{};
    powers[0] = kOne >> 8;
    for (size_t k = 1; k < powers.size(); ++k) powers[k] = times(powers[k - 1], powers[k - 1]);
    return powers;
}
constexpr auto kPowers = make_powers();

struct Part final : Task {
    const uint8_t *data = nullptr;
    size_t size = 0;
    uint32_t crc = 0;

    void run() override { crc = crc32(0, data, size); }
};

unsigned wanted_helpers() {
    static const unsigned count = helpers_wanted("RGPU_SUM_THREADS", kHelpers, [](unsigned processors) {
        return processors < 8 ? 0u : kHelpers;
    });
    return count;
}

Helpers &all_helpers() {
    static auto *all = new Helpers("rgpu-sum", wanted_helpers());  // its threads may outlive static destructors
    return *all;
}
}  // namespace

uint32_t crc32_joined(uint32_t first, uint32_t second, uint64_t second_size) {
    for (size_t k = 0; second_size; ++k, second_size >>= 1)
        if (second_size & 1) first = times(kPowers[k], first);
    return first ^ second;
}

uint32_t crc32_long(uint32_t crc, const void *data, size_t size) {
    const auto *bytes = static_cast<const uint8_t *>(data);
    if (size < 2 * kShare || !wanted_helpers()) return crc32(crc, bytes, size);
    Helpers &all = all_helpers();
    const size_t parts = std::min<size_t>(all.count() + 1, size / kShare), each = size / parts;
    std::array<Part, kHelpers> others;
    for (size_t i = 1; i < parts; ++i) {
        Part &part = others[i - 1];
        part.data = bytes + i * each;
        part.size = i + 1 == parts ? size - i * each : each;
        all.start(part);
    }
    crc = crc32(crc, bytes, each);
    for (size_t i = 1; i < parts; ++i) {
        Part &part = others[i - 1];
        all.wait(part);
        crc = crc32_joined(crc, part.crc, part.size);
    }
    return crc;
}

}  // namespace rgpu
