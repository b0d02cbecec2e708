// CRC-32 as zlib has it (IEEE 802.3, reflected polynomial 0xEDB88320).
#pragma once

#include <cstddef>
#include <cstdint>

namespace rgpu {

// The CRC of `crc`'s bytes followed by these; start with 0. As zlib's crc32().
std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t size);

}  // namespace rgpu
