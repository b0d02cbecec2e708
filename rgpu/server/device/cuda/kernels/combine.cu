// Combines what the ranks of a collective contributed, from memory of this GPU and of others, in the order of ranks.
//
// What is to be done stands in a block of memory that the host fills in after the launch: the kernel is behind a gate of
// its stream (rgpu/server/device/cuda/collectives/direct.py). Results are bit for bit those of
// rgpu/server/collectives/reductions.py: after each step the partial result has the element's own type again.
// combine.ptx and combine.sm_90.cubin are made from this file: python -m rgpu.server.device.cuda.kernels.generate

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum Mode : u32 { NOTHING, REDUCE, GATHER };
enum Type : u32 { FLOAT16 = 6, FLOAT32 = 7, FLOAT64 = 8, BFLOAT16 = 9 };  // ncclDataType_t

enum : u32 { kRanks = 8 };  // a constant would be a variable of the module

struct Work {  // 160 bytes; collectives/combine.py has the same
    u32 mode, type, ranks, scaled;
    u64 bytes;   // of each source
    u64 target;  // GATHER: the first source's bytes, then the second's …
    u64 sources[kRanks];
    u64 factors[kRanks];  // the bytes of each rank's factor, where `scaled`
};

__device__ __forceinline__ u32 bits(float x) { return __float_as_uint(x); }

// As the SSE instructions have it, which the host's numpy uses: the first operand that is a NaN, quiet; else, where
// the operation is invalid, the negative default.
__device__ __forceinline__ float chosen(float a, float b, float r) {
    if (r == r) return r;
    if (a != a) return __uint_as_float(bits(a) | 0x400000u);
    if (b != b) return __uint_as_float(bits(b) | 0x400000u);
    return __uint_as_float(0xFFC00000u);
}
__device__ __forceinline__ double chosen(double a, double b, double r) {
    if (r == r) return r;
    const u64 quiet = 0x8000000000000ull;
    if (a != a) return __longlong_as_double(__double_as_longlong(a) | quiet);
    if (b != b) return __longlong_as_double(__double_as_longlong(b) | quiet);
    return __longlong_as_double(0xFFF8000000000000ull);
}

__device__ __forceinline__ float from_half(u16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}
__device__ __forceinline__ u16 to_half(float x) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return x != x ? 0x7E00 : r;
}
__device__ __forceinline__ float from_bfloat(u16 x) { return __uint_as_float(u32(x) << 16); }
__device__ __forceinline__ u16 to_bfloat(float x) {
    const u32 b = bits(x);
    return x != x ? 0x7FFF : u16((b + 0x7FFFu + (b >> 16 & 1)) >> 16);
}

template <u32 T> struct Of;
template <> struct Of<FLOAT16> { using E = u16; };
template <> struct Of<BFLOAT16> { using E = u16; };
template <> struct Of<FLOAT32> { using E = float; };
template <> struct Of<FLOAT64> { using E = double; };

template <u32 T, typename E> __device__ __forceinline__ E sum(E a, E b) {
    if constexpr (T == FLOAT16) return to_half(__fadd_rn(from_half(a), from_half(b)));
    else if constexpr (T == BFLOAT16) return to_bfloat(__fadd_rn(from_bfloat(a), from_bfloat(b)));
    else if constexpr (T == FLOAT32) return chosen(a, b, __fadd_rn(a, b));
    else return chosen(a, b, __dadd_rn(a, b));
}
template <u32 T, typename E> __device__ __forceinline__ E product(E a, E b) {
    if constexpr (T == FLOAT16) return to_half(__fmul_rn(from_half(a), from_half(b)));
    else if constexpr (T == BFLOAT16) return to_bfloat(__fmul_rn(from_bfloat(a), from_bfloat(b)));
    else if constexpr (T == FLOAT32) return chosen(a, b, __fmul_rn(a, b));
    else return chosen(a, b, __dmul_rn(a, b));
}

template <typename E> union Wide {
    uint4 whole;
    E each[16 / sizeof(E)];
    __device__ Wide() {}
};

// Sources that others' GPUs write are read past the first level of the cache.
__device__ __forceinline__ uint4 load(const uint4 *at) {
    uint4 r;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(at));
    return r;
}

// 16 bytes of each source at a time, kUnroll of them under way.
template <u32 T> __device__ __forceinline__ void reduce(const Work &work, u64 begin, u64 end) {
    using E = typename Of<T>::E;
    constexpr u32 kAt = 16 / sizeof(E), kUnroll = 4;
    const u64 stride = u64(gridDim.x) * blockDim.x, me = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    for (u64 at = begin / 16 + me; at < end / 16; at += stride * kUnroll) {
        Wide<E> total[kUnroll], next[kUnroll];
        const auto fetch = [&](u32 rank) {
#pragma unroll
            for (u32 u = 0; u < kUnroll; ++u)
                if (at + u * stride < end / 16)
                    next[u].whole = load(reinterpret_cast<const uint4 *>(work.sources[rank]) + at + u * stride);
        };
        fetch(0);
#pragma unroll 1
        for (u32 rank = 0; rank < work.ranks; ++rank) {
            Wide<E> one[kUnroll];
#pragma unroll
            for (u32 u = 0; u < kUnroll; ++u) one[u].whole = next[u].whole;
            if (rank + 1 < work.ranks) fetch(rank + 1);
            if (work.scaled) {
                const E factor = *reinterpret_cast<const E *>(&work.factors[rank]);
#pragma unroll
                for (u32 u = 0; u < kUnroll; ++u)
#pragma unroll
                    for (u32 e = 0; e < kAt; ++e) one[u].each[e] = product<T>(one[u].each[e], factor);
            }
#pragma unroll
            for (u32 u = 0; u < kUnroll; ++u)
#pragma unroll
                for (u32 e = 0; e < kAt; ++e)
                    total[u].each[e] = rank ? sum<T>(total[u].each[e], one[u].each[e]) : one[u].each[e];
        }
#pragma unroll
        for (u32 u = 0; u < kUnroll; ++u)
            if (at + u * stride < end / 16) reinterpret_cast<uint4 *>(work.target)[at + u * stride] = total[u].whole;
    }
}

// Element by element: what is left behind the last 16 bytes, or all of it where the target is not aligned.
template <u32 T> __device__ void reduce_each(const Work &work, u64 begin, u64 end) {
    using E = typename Of<T>::E;
    const u64 stride = u64(gridDim.x) * blockDim.x, me = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    for (u64 at = begin / sizeof(E) + me; at < end / sizeof(E); at += stride) {
        E value{};
        for (u32 r = 0; r < work.ranks; ++r) {
            E one = reinterpret_cast<const volatile E *>(work.sources[r])[at];
            if (work.scaled) one = product<T>(one, *reinterpret_cast<const E *>(&work.factors[r]));
            value = r ? sum<T>(value, one) : one;
        }
        reinterpret_cast<E *>(work.target)[at] = value;
    }
}

template <u32 T> __device__ void reduced(const Work &work, u64 begin, u64 end, bool aligned) {
    const u64 whole = aligned ? end / 16 * 16 : begin;
    if (aligned) reduce<T>(work, begin, whole);
    reduce_each<T>(work, whole, end);
}

__device__ void gathered(const Work &work, u64 begin, u64 end) {
    const u64 stride = u64(gridDim.x) * blockDim.x, me = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    for (u32 r = 0; r < work.ranks; ++r) {
        const u64 to = work.target + r * work.bytes, from = work.sources[r];
        const u64 whole = (to | from) % 16 ? begin : end / 16 * 16;
        for (u64 at = begin / 16 + me; at < whole / 16; at += stride * 4) {
            uint4 in[4];
#pragma unroll
            for (u32 u = 0; u < 4; ++u)
                if (at + u * stride < whole / 16) in[u] = load(reinterpret_cast<const uint4 *>(from) + at + u * stride);
#pragma unroll
            for (u32 u = 0; u < 4; ++u)
                if (at + u * stride < whole / 16) reinterpret_cast<uint4 *>(to)[at + u * stride] = in[u];
        }
        for (u64 at = whole + me; at < end; at += stride)
            reinterpret_cast<u8 *>(to)[at] = reinterpret_cast<const volatile u8 *>(from)[at];
    }
}

// The part [begin, end) of each source; both multiples of 16, but the last end.
extern "C" __global__ void __launch_bounds__(512) rgpu_combine(const Work *given, u64 begin, u64 end) {
    __shared__ Work work;
    if (threadIdx.x < sizeof(Work) / 8)
        reinterpret_cast<u64 *>(&work)[threadIdx.x] = reinterpret_cast<const volatile u64 *>(given)[threadIdx.x];
    __syncthreads();
    if (end > work.bytes) end = work.bytes;
    if (begin >= end || work.mode == NOTHING) return;
    if (work.mode == GATHER) return gathered(work, begin, end);
    u64 low = work.target;
    for (u32 r = 0; r < work.ranks; ++r) low |= work.sources[r];
    const bool aligned = low % 16 == 0;
    switch (work.type) {
        case FLOAT16: return reduced<FLOAT16>(work, begin, end, aligned);
        case FLOAT32: return reduced<FLOAT32>(work, begin, end, aligned);
        case FLOAT64: return reduced<FLOAT64>(work, begin, end, aligned);
        case BFLOAT16: return reduced<BFLOAT16>(work, begin, end, aligned);
        default: return;
    }
}
