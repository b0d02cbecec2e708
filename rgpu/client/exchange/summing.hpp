// XXH3 (128 bits, without a seed) of many leaves of a long answer, by several threads that need no interpreter.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rgpu {

inline constexpr size_t kShortest = 241;  // bytes that sum() takes at least: XXH3 has another form below
inline constexpr size_t kDigest = 16;     // bytes of a digest, as XXH128_canonicalFromHash gives them

inline constexpr unsigned kBest = ~0u;    // the quickest kind that this processor has; others are for tests

void sum(const uint8_t *data, size_t size, uint8_t *digest, unsigned kind);
// Of `count` leaves of `leaf` bytes each, one behind the other; `threads` at most, this one among them.
void sum_leaves(const uint8_t *data, size_t leaf, size_t count, uint8_t *digests, unsigned threads);

}  // namespace rgpu
