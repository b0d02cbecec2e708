// Three implementations: carry-less multiplication where the processor supports it (each 64 bytes are folded into the
// next, as in Gopal et al., "Fast CRC Computation Using PCLMULQDQ", Intel 2009), of four lanes at once (256 bytes)
// where that is supported, else eight tables. The fold constants are computed here from the polynomial.
#include "crc32.hpp"

// GCC's own header deliberately reads a variable that it leaves uninitialised.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <array>
#include <cstring>

namespace rgpu {
namespace {

constexpr std::uint32_t POLYNOMIAL = 0xEDB88320u;

constexpr auto make_tables() {
  std::array<std::array<std::uint32_t, 256>, 8> t{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? POLYNOMIAL : 0);
    t[0][i] = c;
  }
  for (int k = 1; k < 8; ++k)
    for (int i = 0; i < 256; ++i) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xFF];
  return t;
}
constexpr auto TABLES = make_tables();

// x^n mod P in reflected bit order, shifted left by one: the form that a 64 x 64 bit carry-less product of reflected
// operands needs.
constexpr std::uint64_t power(unsigned n) {
  std::uint32_t r = 0x80000000u;  // x^0
  for (unsigned i = 0; i < n; ++i) r = (r >> 1) ^ ((r & 1) ? POLYNOMIAL : 0);
  return std::uint64_t{r} << 1;
}

// The register (not inverted) after these bytes.
std::uint32_t by_tables(std::uint32_t c, const std::uint8_t* p, std::size_t n) {
  while (n >= 8) {
    std::uint64_t w;
    std::memcpy(&w, p, 8);
    w ^= c;
    c = TABLES[7][w & 0xFF] ^ TABLES[6][(w >> 8) & 0xFF] ^ TABLES[5][(w >> 16) & 0xFF] ^
        TABLES[4][(w >> 24) & 0xFF] ^ TABLES[3][(w >> 32) & 0xFF] ^ TABLES[2][(w >> 40) & 0xFF] ^
        TABLES[1][(w >> 48) & 0xFF] ^ TABLES[0][w >> 56];
    p += 8;
    n -= 8;
  }
  for (; n; --n) c = (c >> 8) ^ TABLES[0][(c ^ *p++) & 0xFF];
  return c;
}

__attribute__((target("pclmul,sse2"))) inline __m128i fold(__m128i a, __m128i next, __m128i k) {
  return _mm_xor_si128(next,
                       _mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x00), _mm_clmulepi64_si128(a, k, 0x11)));
}

// Requires n >= 64.
__attribute__((target("pclmul,sse2"))) std::uint32_t by_folding(std::uint32_t c, const std::uint8_t* p,
                                                               std::size_t n) {
  const auto load = [](const std::uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); };
  constexpr long long FOUR[2] = {static_cast<long long>(power(512 + 32)), static_cast<long long>(power(512 - 32))};
  constexpr long long ONE[2] = {static_cast<long long>(power(128 + 32)), static_cast<long long>(power(128 - 32))};
  const __m128i four = _mm_set_epi64x(FOUR[1], FOUR[0]), one = _mm_set_epi64x(ONE[1], ONE[0]);
  __m128i a = _mm_xor_si128(load(p), _mm_cvtsi32_si128(static_cast<int>(c)));
  __m128i b = load(p + 16), d = load(p + 32), e = load(p + 48);
  for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
    a = fold(a, load(p), four);
    b = fold(b, load(p + 16), four);
    d = fold(d, load(p + 32), four);
    e = fold(e, load(p + 48), four);
  }
  a = fold(fold(fold(a, b, one), d, one), e, one);
  for (; n >= 16; p += 16, n -= 16) a = fold(a, load(p), one);
  // The rest is congruent to all bytes before it: sixteen bytes from a zero register.
  alignas(16) std::uint8_t rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), a);
  return by_tables(by_tables(0, rest, 16), p, n);
}

#define RGPU_WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse2")))

RGPU_WIDE inline __m512i fold_wide(__m512i a, __m512i next, __m512i k) {
  return _mm512_ternarylogic_epi64(next, _mm512_clmulepi64_epi128(a, k, 0x00), _mm512_clmulepi64_epi128(a, k, 0x11),
                                   0x96);  // the xor of all three
}

// Requires n >= 256.
RGPU_WIDE std::uint32_t by_wide_folding(std::uint32_t c, const std::uint8_t* p, std::size_t n) {
  constexpr auto constant = [](unsigned bits) { return static_cast<long long>(power(bits)); };
  constexpr long long FAR[2] = {constant(2048 + 32), constant(2048 - 32)};
  constexpr long long NEAR[2] = {constant(512 + 32), constant(512 - 32)};
  constexpr long long ONE[2] = {constant(128 + 32), constant(128 - 32)};
  const __m512i far = _mm512_set_epi64(FAR[1], FAR[0], FAR[1], FAR[0], FAR[1], FAR[0], FAR[1], FAR[0]);
  const __m512i near = _mm512_set_epi64(NEAR[1], NEAR[0], NEAR[1], NEAR[0], NEAR[1], NEAR[0], NEAR[1], NEAR[0]);
  const __m128i one = _mm_set_epi64x(ONE[1], ONE[0]);
  __m512i a = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, c));
  __m512i b = _mm512_loadu_si512(p + 64), d = _mm512_loadu_si512(p + 128), e = _mm512_loadu_si512(p + 192);
  for (p += 256, n -= 256; n >= 256; p += 256, n -= 256) {
    a = fold_wide(a, _mm512_loadu_si512(p), far);
    b = fold_wide(b, _mm512_loadu_si512(p + 64), far);
    d = fold_wide(d, _mm512_loadu_si512(p + 128), far);
    e = fold_wide(e, _mm512_loadu_si512(p + 192), far);
  }
  a = fold_wide(fold_wide(fold_wide(a, b, near), d, near), e, near);
  for (; n >= 64; p += 64, n -= 64) a = fold_wide(a, _mm512_loadu_si512(p), near);
  __m128i all = fold(_mm512_extracti32x4_epi32(a, 0), _mm512_extracti32x4_epi32(a, 1), one);
  all = fold(fold(all, _mm512_extracti32x4_epi32(a, 2), one), _mm512_extracti32x4_epi32(a, 3), one);
  alignas(16) std::uint8_t rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), all);
  return by_tables(by_tables(0, rest, 16), p, n);
}

bool has_wide() {
  static const bool yes = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
  return yes;
}

bool has_clmul() {
  static const bool yes = __builtin_cpu_supports("pclmul");
  return yes;
}

}  // namespace

std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t size) {
  const auto* p = static_cast<const std::uint8_t*>(data);
  const std::uint32_t c = ~crc;
  if (size >= 512 && has_wide()) return ~by_wide_folding(c, p, size);
  return ~(size >= 128 && has_clmul() ? by_folding(c, p, size) : by_tables(c, p, size));
}

}  // namespace rgpu
