// Reservation of the address ranges of sessions, when the driver library or the routing library is loaded.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace rgpu {

// Reserves addresses, without memory; returns 0 or an errno.
inline int reserve(std::uint64_t base, std::uint64_t size) {
  void* wanted = reinterpret_cast<void*>(base);
  void* got = ::mmap(wanted, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (got == MAP_FAILED) return errno;
  if (got != wanted) {  // a kernel before 4.17 treats the flag as a hint
    ::munmap(got, size);
    return EEXIST;
  }
  ::madvise(got, size, MADV_DONTDUMP);
  return 0;
}

}  // namespace rgpu
