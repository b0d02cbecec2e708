// The long form of XXH3 as its specification has it (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): stripes of 64
// bytes are multiplied into eight words, which are scrambled after each block of 1024 bytes.
#include "summing.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

// GCC's own header deliberately reads a variable that it leaves uninitialised.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

namespace rgpu {
namespace {

constexpr size_t kStripe = 64, kBlock = 1024, kSecret = 192, kWords = 8;
constexpr uint64_t k32_1 = 0x9E3779B1, k32_2 = 0x85EBCA77, k32_3 = 0xC2B2AE3D;
constexpr uint64_t k64_1 = 0x9E3779B185EBCA87, k64_2 = 0xC2B2AE3D27D4EB4F, k64_3 = 0x165667B19E3779F9,
                   k64_4 = 0x85EBCA77C2B2AE63, k64_5 = 0x27D4EB2F165667C5;

alignas(64) constexpr uint8_t kKey[kSecret] = {  // the specification's
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t word(const uint8_t *at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// -- one stripe, and the end of a block -------------------------------------------------

void stripe(uint64_t *words, const uint8_t *data, const uint8_t *key) {
    for (size_t i = 0; i < kWords; ++i) {
        const uint64_t value = word(data + 8 * i), mixed = value ^ word(key + 8 * i);
        words[i ^ 1] += value;
        words[i] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
    }
}

#define RGPU_AVX2 __attribute__((target("avx2")))
#define RGPU_AVX512 __attribute__((target("avx512f")))

void scramble(uint64_t *words) {
    for (size_t i = 0; i < kWords; ++i) {
        words[i] = (words[i] ^ words[i] >> 47 ^ word(kKey + kSecret - kStripe + 8 * i)) * k32_1;
    }
}

void block_plain(uint64_t *words, const uint8_t *data, size_t stripes) {
    for (size_t n = 0; n < stripes; ++n) stripe(words, data + n * kStripe, kKey + 8 * n);
}

RGPU_AVX2 inline __m256i half_avx2(__m256i sum, const uint8_t *from, const uint8_t *key) {
    const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    const __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(key)));
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_shuffle_epi32(mixed, 0x31));
    return _mm256_add_epi64(_mm256_add_epi64(sum, _mm256_shuffle_epi32(value, 0x4E)), product);
}

RGPU_AVX2 void block_avx2(uint64_t *words, const uint8_t *data, size_t stripes) {
    auto *at = reinterpret_cast<__m256i *>(words);
    __m256i low = _mm256_loadu_si256(at), high = _mm256_loadu_si256(at + 1);
    for (size_t n = 0; n < stripes; ++n) {
        low = half_avx2(low, data + n * kStripe, kKey + 8 * n);
        high = half_avx2(high, data + n * kStripe + 32, kKey + 8 * n + 32);
    }
    _mm256_storeu_si256(at, low);
    _mm256_storeu_si256(at + 1, high);
}

RGPU_AVX512 void block_avx512(uint64_t *words, const uint8_t *data, size_t stripes) {
    __m512i sum = _mm512_loadu_si512(words);
    for (size_t n = 0; n < stripes; ++n) {
        const __m512i value = _mm512_loadu_si512(data + n * kStripe);
        const __m512i mixed = _mm512_xor_si512(value, _mm512_loadu_si512(kKey + 8 * n));
        const __m512i product = _mm512_mul_epu32(mixed, _mm512_shuffle_epi32(mixed, _MM_PERM_CDAB));
        sum = _mm512_add_epi64(_mm512_add_epi64(sum, _mm512_shuffle_epi32(value, _MM_PERM_BADC)), product);
    }
    _mm512_storeu_si512(words, sum);
}

using Block = void (*)(uint64_t *, const uint8_t *, size_t);
// 0: any processor's, 1: AVX2, 2: AVX-512; above: the best of these that this processor has.
Block block_of(unsigned kind) {
    if (kind >= 2 && __builtin_cpu_supports("avx512f")) return block_avx512;
    if (kind >= 1 && __builtin_cpu_supports("avx2")) return block_avx2;
    return block_plain;
}

uint64_t folded(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merged(const uint64_t *words, const uint8_t *key, uint64_t found) {
    for (size_t i = 0; i < kWords; i += 2)
        found += folded(words[i] ^ word(key + 8 * i), words[i + 1] ^ word(key + 8 * i + 8));
    found = (found ^ found >> 37) * 0x165667919E3779F9;
    return found ^ found >> 32;
}

void store(uint64_t value, uint8_t *at) {
    value = __builtin_bswap64(value);
    std::memcpy(at, &value, sizeof value);
}

// -- several threads ----------------------------------------------------------------------

constexpr int64_t kSpin = 100'000;  // ns that a thread polls for the next leaves: the next piece follows soon
constexpr unsigned kMost = 15;      // threads beside the caller's

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// One job at a time; its threads live as long as the process.
class Pool {
   public:
    void run(const uint8_t *data, size_t leaf, size_t count, uint8_t *digests, unsigned threads) {
        std::lock_guard lock(callers_);
        start(std::min<size_t>({threads, count, kMost + 1}));
        data_ = data, leaf_ = leaf, digests_ = digests;
        done_.store(0, std::memory_order_relaxed);
        left_.store(count, std::memory_order_release);
        job_.fetch_add(1, std::memory_order_release);
        job_.notify_all();
        work();
        while (done_.load(std::memory_order_acquire) < count) sched_yield();
    }

   private:
    void start(unsigned threads) {
        if (started_ + 1 >= threads) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before);  // signals are handled by the interpreter's threads
        try {
            for (; started_ + 1 < threads; ++started_)
                std::thread([this, seen = job_.load(std::memory_order_relaxed)] { wait(seen); }).detach();
        } catch (const std::system_error &) {  // then those that there are do it
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Who has claimed a leaf keeps run() from returning, and so from changing what the next line reads.
    void work() {
        for (size_t left = left_.load(std::memory_order_acquire); left;) {
            if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acquire)) continue;
            sum(data_ + (left - 1) * leaf_, leaf_, digests_ + (left - 1) * kDigest, kBest);
            done_.fetch_add(1, std::memory_order_release);
            left = left_.load(std::memory_order_acquire);
        }
    }

    [[noreturn]] void wait(uint32_t seen) {
        pthread_setname_np(pthread_self(), "rgpu-summing");
        for (;; seen = job_.load(std::memory_order_acquire), work()) {
            const int64_t until = now_ns() + kSpin;
            while (job_.load(std::memory_order_acquire) == seen && now_ns() < until) sched_yield();
            job_.wait(seen, std::memory_order_acquire);
        }
    }

    std::mutex callers_;
    unsigned started_ = 0;
    const uint8_t *data_ = nullptr;
    uint8_t *digests_ = nullptr;
    size_t leaf_ = 0;
    std::atomic<size_t> left_{0}, done_{0};  // leaves that nobody has claimed; that are summed
    std::atomic<uint32_t> job_{0};
};

}  // namespace

void sum(const uint8_t *data, size_t size, uint8_t *digest, unsigned kind) {
    static const Block best = block_of(kBest);
    uint64_t words[kWords] = {k32_3, k64_1, k64_2, k64_3, k64_4, k32_2, k64_5, k32_1};
    const Block block = kind == kBest ? best : block_of(kind);
    const size_t blocks = (size - 1) / kBlock;
    for (size_t n = 0; n < blocks; ++n) {
        block(words, data + n * kBlock, kBlock / kStripe);
        scramble(words);
    }
    block(words, data + blocks * kBlock, (size - 1 - blocks * kBlock) / kStripe);
    stripe(words, data + size - kStripe, kKey + kSecret - kStripe - 7);
    store(merged(words, kKey + kSecret - kStripe - 11, ~(size * k64_2)), digest);
    store(merged(words, kKey + 11, size * k64_1), digest + 8);
}

void sum_leaves(const uint8_t *data, size_t leaf, size_t count, uint8_t *digests, unsigned threads) {
    if (threads < 2 || count < 2) {
        for (size_t at = 0; at < count; ++at) sum(data + at * leaf, leaf, digests + at * kDigest, kBest);
        return;
    }
    static auto *pool = new Pool;  // its threads outlive static destructors
    pool->run(data, leaf, count, digests, threads);
}

}  // namespace rgpu

#define RGPU_API extern "C" __attribute__((visibility("default")))

// summing.hpp. 0: it is too short.
RGPU_API int rgx_sum(const uint8_t *data, size_t size, uint8_t *digest, unsigned kind) {
    if (size < rgpu::kShortest) return 0;
    rgpu::sum(data, size, digest, kind);
    return 1;
}
RGPU_API int rgx_sum_leaves(const uint8_t *data, size_t leaf, size_t count, uint8_t *digests, unsigned threads) {
    if (leaf < rgpu::kShortest) return 0;
    rgpu::sum_leaves(data, leaf, count, digests, threads);
    return 1;
}
