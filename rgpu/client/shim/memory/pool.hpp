// Memory pools, as pool.cpp and their sharing with other processes (pool_share.cpp) see them.
#pragma once

#include <map>
#include <mutex>

#include "handles.hpp"

namespace rgpu {

struct Pool : Object {
  Pool() : Object(Kind::pool) {}
  CUdevice device = 0;
  bool standard = false;   // the device's own: cannot be destroyed
  bool shareable = false;  // its memory may be shared with other processes
  bool imported = false;   // another process's: nothing is allocated from it
  std::mutex lock;         // guards the attributes
  int reuse[3] = {1, 1, 1};
  std::uint64_t threshold = 0;
  std::map<CUdevice, CUmemAccess_flags> access;  // of other devices
};

inline Pool* find_pool(CUmemoryPool handle) { return static_cast<Pool*>(find_object(handle, Kind::pool)); }

// pool_share.cpp: notes that the memory at the address is from a shareable pool.
void note_shareable(std::uint64_t address);

}  // namespace rgpu
