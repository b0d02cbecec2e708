// CRC-32 as in zlib (IEEE 802.3, reflected polynomial 0xEDB88320).
#pragma once

#include <cstddef>
#include <cstdint>

namespace rgpu {

// Continues `crc`, the CRC of earlier bytes, over these bytes; start with 0. As zlib's crc32().
std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t size);

}  // namespace rgpu
