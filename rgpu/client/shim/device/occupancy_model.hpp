// The number of blocks of a kernel that fit on a multiprocessor: pure arithmetic.
//
// Equal to the driver's own answers for every case recorded on an H200 (tests/client/shim/handshake/native_580.json).
// Registers are allocated to a warp in units of 256, from one of four partitions; shared memory to a block in units of
// 128 bytes (256 before compute capability 8.0), plus the bytes that the system reserves for each block.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace rgpu::occupancy {

// Values of CU_DEVICE_ATTRIBUTE_*.
struct Device {
    int threads_per_block = 1024;
    int threads_per_multiprocessor = 1024;
    int blocks_per_multiprocessor = 16;
    int registers_per_multiprocessor = 65536;
    int shared_per_multiprocessor = 65536;
    int shared_reserved_per_block = 0;
    int multiprocessors = 1;
    int warp = 32;
    int major = 7;
};

// Values of CU_FUNC_ATTRIBUTE_*.
struct Kernel {
    int threads_per_block = 1024;  // MAX_THREADS_PER_BLOCK
    int shared_static = 0;         // SHARED_SIZE_BYTES
    int shared_dynamic = 49152;    // MAX_DYNAMIC_SHARED_SIZE_BYTES
    int registers = 32;            // NUM_REGS, for each thread
};

constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

constexpr int kPartitions = 4;     // warp schedulers, each with a quarter of the registers
constexpr int kRegisterUnit = 256;

constexpr std::int64_t shared_unit(const Device& device) { return device.major >= 8 ? 128 : 256; }

// Blocks that fit by warps, block slots and registers alone.
inline std::int64_t blocks_without_shared(const Device& device, const Kernel& kernel, int block_size) {
    const std::int64_t warps = (block_size + device.warp - 1) / device.warp;
    std::int64_t fit = std::min<std::int64_t>(device.blocks_per_multiprocessor,
                                              device.threads_per_multiprocessor / device.warp / warps);
    if (kernel.registers > 0) {
        const std::int64_t per_warp = round_up(std::int64_t{kernel.registers} * device.warp, kRegisterUnit);
        const std::int64_t resident = device.registers_per_multiprocessor / kPartitions / per_warp * kPartitions;
        fit = std::min(fit, resident / warps);
    }
    return fit;
}

// cuOccupancyMaxActiveBlocksPerMultiprocessor for a block_size of at least 1.
inline int active_blocks(const Device& device, const Kernel& kernel, int block_size, std::size_t dynamic) {
    if (block_size > device.threads_per_block) return 0;
    if (dynamic > static_cast<std::size_t>(std::max(kernel.shared_dynamic, 0))) return 0;
    const std::int64_t wanted = std::int64_t{kernel.shared_static} + static_cast<std::int64_t>(dynamic) +
                                device.shared_reserved_per_block;
    std::int64_t fit = blocks_without_shared(device, kernel, block_size);
    if (wanted > 0) {
        fit = std::min(fit, device.shared_per_multiprocessor / round_up(wanted, shared_unit(device)));
    }
    return static_cast<int>(fit);
}

struct Potential {
    int grid = 0;
    int block = 0;
};

// cuOccupancyMaxPotentialBlockSize: the largest block, in steps of a warp, that
// fills most threads of a multiprocessor. `dynamic` maps a block size to bytes.
template <typename Dynamic>
Potential potential_block(const Device& device, const Kernel& kernel, Dynamic dynamic, int limit) {
    const int cap = limit > 0 ? std::min(limit, kernel.threads_per_block) : kernel.threads_per_block;
    int best_threads = 0;
    Potential best;
    for (int rounded = static_cast<int>(round_up(cap, device.warp)); rounded > 0; rounded -= device.warp) {
        const int block = std::min(rounded, cap);
        const int fit = active_blocks(device, kernel, block, dynamic(block));
        if (block * fit > best_threads) {
            best_threads = block * fit;
            best = {fit * device.multiprocessors, block};
        }
        if (best_threads == device.threads_per_multiprocessor) break;  // no other block size can be better
    }
    return best;
}

// The answer of cuOccupancyAvailableDynamicSMemPerBlock; -1 where `blocks` blocks do not fit at all.
inline std::int64_t available_dynamic(const Device& device, const Kernel& kernel, int blocks, int block_size) {
    if (blocks <= 0 || block_size <= 0 || blocks_without_shared(device, kernel, block_size) < blocks) return -1;
    const std::int64_t unit = shared_unit(device);
    // The driver leaves its own reservation out of this answer, and so does this function.
    const std::int64_t share = device.shared_per_multiprocessor / blocks / unit * unit;
    const std::int64_t left = std::min<std::int64_t>(share - kernel.shared_static, kernel.shared_dynamic);
    return left < 0 ? -1 : left;
}

}  // namespace rgpu::occupancy
