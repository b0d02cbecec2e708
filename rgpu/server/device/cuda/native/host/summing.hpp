// The checksum of a long payload by several threads: one thread reads memory more slowly than links deliver it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rgpu {

// The CRC-32 of A followed by B, from that of each (started with 0) and the length of B.
uint32_t crc32_joined(uint32_t first, uint32_t second, uint64_t second_size);

// As crc32(); long data are shared between helper threads (none where processors are few) and this one.
uint32_t crc32_long(uint32_t crc, const void *data, size_t size);

}  // namespace rgpu
