// The page hash of rgpu/checkpoint/pages/pagehash.py (its definition and bound are there), one warp to a page.
//
// Lane l of a warp reads 16 bytes of each of the page's 128 rows: column l. It keeps the column's four NH sums in
// registers; the key word at a row is the same for all lanes, a broadcast read of shared memory. ROWS_AHEAD rows are
// loaded ahead, and 8 * BLOCKS_PER_SM pages are in flight on a multiprocessor: at the default, 24 x 4 KiB. Blocks take
// a bounded number of pages each (the caller's choice), so that work of higher priority can run in between.
//
// pagehash.ptx and pagehash.sm_90.cubin are made from this file: python -m rgpu.server.device.cuda.kernels.generate
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef ROWS_AHEAD
#define ROWS_AHEAD 8
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 3
#endif

// Enumerators, since constexpr variables would become variables of the module.
enum : u32 {
    PAGE = 65536,
    ROWS = 128,
    ROW_BYTES = 512,
    LANES = 4,
    WARPS = 8,        // of a block
    KEY_WORDS = 520,  // 518, and two that fill the last 16 bytes
    COEFFICIENTS = 257,
};
enum : u64 { PRIME = (1ull << 61) - 1 };

struct Key {
    u32 words[KEY_WORDS];
    u64 multipliers[2][COEFFICIENTS];
};

// A range of device memory; `first` counts the pages of the segments before it.
struct Segment {
    u64 address, bytes, first;
};

struct Shared {
    uint4 words[KEY_WORDS / 4];
    u64 multipliers[2][8][32];  // [j][coefficient of the column][column]: lanes side by side
    u64 length_multiplier[2];
};

__device__ __forceinline__ void fill(Shared& shared, const Key* key) {
    u32* words = reinterpret_cast<u32*>(shared.words);
    for (u32 i = threadIdx.x; i < KEY_WORDS; i += blockDim.x) words[i] = key->words[i];
    for (u32 i = threadIdx.x; i < 512; i += blockDim.x)
        shared.multipliers[i >> 8][i & 7][i >> 3 & 31] = key->multipliers[i >> 8][i & 255];
    if (threadIdx.x < 2) shared.length_multiplier[threadIdx.x] = key->multipliers[threadIdx.x][COEFFICIENTS - 1];
    __syncthreads();
}

// Volatile: each word is read once, so the stored bytes are the hashed ones, whatever the program writes meanwhile.
__device__ __forceinline__ uint4 load(u64 address) {
    uint4 v;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

// Reads 4 bytes, at any address, of which the first `left` are the region's (any number, also none).
__device__ __forceinline__ u32 load_bytes(u64 address, int left) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 byte = 0;
        if (i < left) asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte) : "l"(address + i));
        word |= byte << 8 * i;
    }
    return word;
}

__device__ __forceinline__ void store(u64 address, uint4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

struct Column {
    u64 n[LANES];
    u32 any;
    uint4 a, b;  // the key words of this row and of the next

    __device__ __forceinline__ void start(const Shared& shared) {
#pragma unroll
        for (u32 t = 0; t < LANES; ++t) n[t] = 0;
        any = 0;
        a = shared.words[0];
        b = shared.words[1];
    }

    __device__ __forceinline__ static u64 product(u32 x, u32 k, u32 y, u32 l) { return u64(x + k) * u64(y + l); }

    __device__ __forceinline__ void row(const Shared& shared, u32 r, uint4 m) {
        const uint4 c = shared.words[r + 2];
        n[0] += product(m.x, a.x, m.y, a.y);
        n[0] += product(m.z, a.z, m.w, a.w);
        n[1] += product(m.x, a.z, m.y, a.w);
        n[1] += product(m.z, b.x, m.w, b.y);
        n[2] += product(m.x, b.x, m.y, b.y);
        n[2] += product(m.z, b.z, m.w, b.w);
        n[3] += product(m.x, b.z, m.y, b.w);
        n[3] += product(m.z, c.x, m.w, c.y);
        any |= m.x | m.y;
        any |= m.z | m.w;
        a = b;
        b = c;
    }
};

// Reduces a value below 2^64 to one below 2^61 + 8 of the same residue.
__device__ __forceinline__ u64 fold(u64 x) { return (x & PRIME) + (x >> 61); }

// H[j] in lane 0: the sum over the warp's columns, and the length.
__device__ __forceinline__ u64 level2(const Shared& shared, const Column& column, u32 j, u32 lane, u32 length) {
    u64 low = 0, high = 0;  // below 8 * 2^61 and 8 * 2^32: neither overflows
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u64 c = i & 1 ? column.n[i / 2] >> 32 : column.n[i / 2] & 0xffffffffull;
        const u64 q = shared.multipliers[j][i][lane];
        const u64 product = c * q;
        low += product & PRIME;
        high += __umul64hi(c, q) << 3 | product >> 61;
    }
    u64 sum = fold(low) + high;
#pragma unroll
    for (u32 distance = 16; distance; distance /= 2)
        sum = fold(sum + __shfl_xor_sync(0xffffffffu, sum, distance));
    const u64 q = shared.length_multiplier[j];
    const u64 product = length * q;
    sum = fold(sum + (product & PRIME) + (__umul64hi(length, q) << 3 | product >> 61));
    return sum >= PRIME ? sum - PRIME : sum;
}

// Returns the segment that page `page` belongs to: the last whose `first` is not above it.
__device__ __forceinline__ Segment find(const Segment* segments, u32 count, u64 page) {
    u32 low = 0, high = count - 1;
    while (low < high) {
        const u32 middle = (low + high + 1) / 2;
        if (segments[middle].first <= page) low = middle;
        else high = middle - 1;
    }
    return segments[low];
}

template <bool COPY>
__device__ __forceinline__ void whole_page(const Shared& shared, Column& column, u64 from, u64 to) {
#pragma unroll 1
    for (u32 r = 0; r < ROWS; r += ROWS_AHEAD, from += ROWS_AHEAD * ROW_BYTES, to += ROWS_AHEAD * ROW_BYTES) {
        uint4 m[ROWS_AHEAD];
#pragma unroll
        for (u64 i = 0; i < ROWS_AHEAD; ++i) m[i] = load(from + i * ROW_BYTES);
#pragma unroll
        for (u64 i = 0; i < ROWS_AHEAD; ++i) {
            column.row(shared, r + i, m[i]);
            if (COPY) store(to + i * ROW_BYTES, m[i]);
        }
    }
}

// A page that is short or not at a multiple of 16; `left` bytes from `from` on are the region's, perhaps zero or fewer.
template <bool COPY>
__device__ __forceinline__ void odd_page(const Shared& shared, Column& column, u64 from, u64 to, int left) {
#pragma unroll 1
    for (u32 r = 0; r < ROWS; ++r, from += ROW_BYTES, to += ROW_BYTES, left -= ROW_BYTES) {
        const uint4 m = make_uint4(load_bytes(from, left), load_bytes(from + 4, left - 4),
                                   load_bytes(from + 8, left - 8), load_bytes(from + 12, left - 12));
        column.row(shared, r, m);
        if (COPY) store(to, m);
    }
}

template <bool COPY>
__device__ __forceinline__ void hash_pages(const Segment* segments, u32 count, u32 pages, u32 per_warp, const Key* key,
                                           ulonglong2* hashes, u8* zero, u64 staging) {
    __shared__ Shared shared;
    fill(shared, key);
    const u32 lane = threadIdx.x % 32;
    // The warps of a block process its pages side by side.
    const u64 first = u64(blockIdx.x) * WARPS * per_warp + threadIdx.x / 32;
    for (u32 i = 0; i < per_warp && first + i * WARPS < pages; ++i) {
        const u64 page = first + i * WARPS;
        const Segment segment = find(segments, count, page);
        const u64 offset = (page - segment.first) * PAGE, left = segment.bytes - offset;
        const u64 from = segment.address + offset + lane * 16, to = staging + page * PAGE + lane * 16;
        const u32 length = left < PAGE ? u32(left) : PAGE;
        Column column;
        column.start(shared);
        if (length == PAGE && from % 16 == 0) whole_page<COPY>(shared, column, from, to);
        else odd_page<COPY>(shared, column, from, to, int(length) - int(lane * 16));
        const u64 h0 = level2(shared, column, 0, lane, length), h1 = level2(shared, column, 1, lane, length);
        const bool any = __any_sync(0xffffffffu, column.any != 0);
        if (lane == 0) {
            hashes[page] = make_ulonglong2(h0, h1);
            zero[page] = !any;
        }
    }
}

// Hashes the segments' pages in order: hashes[i], and whether page i is all zeros. Blocks of 8 warps, each per_warp
// pages.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
rgpu_hash_pages(const Segment* segments, u32 count, u32 pages, u32 per_warp, const Key* key, ulonglong2* hashes,
                u8* zero) {
    hash_pages<false>(segments, count, pages, per_warp, key, hashes, zero, 0);
}

// As above, and writes page i, as it was hashed, to staging + 65,536 i; the rest of a short page's place becomes zeros.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
rgpu_copy_hash_pages(const Segment* segments, u32 count, u32 pages, u32 per_warp, const Key* key, ulonglong2* hashes,
                     u8* zero, u64 staging) {
    hash_pages<true>(segments, count, pages, per_warp, key, hashes, zero, staging);
}
