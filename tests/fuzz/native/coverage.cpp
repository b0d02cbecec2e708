// What -fsanitize-coverage=trace-pc calls. Compiled without coverage. Twice at one place is something new, eight times too.
#include "fuzzing.hpp"

extern "C" void __sanitizer_cov_trace_pc() {
    const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    static std::array<uint8_t, fuzzing::kPlaces> times;
    static constexpr uint8_t steps[] = {1, 2, 4, 8, 16, 32, 64, 128};
    uint8_t &here = fuzzing::hit[(place ^ place >> 16) % fuzzing::kPlaces];
    uint8_t &count = times[(place ^ place >> 16) % fuzzing::kPlaces];
    if (!here) count = 0;
    if (count < 255) ++count;
    uint8_t level = 0;
    for (const uint8_t step : steps) level += count >= step;
    here = level;
}
