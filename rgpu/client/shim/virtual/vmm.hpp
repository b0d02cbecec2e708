// Virtual memory management as its files share it: reservations, handles, mappings.
//
// Reservations come from a window of the session's own range (kReserveOffset
// behind the device's base), so that mapped memory keeps its addresses on every
// server.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "context.hpp"
#include "ipc.hpp"
#include "memory.hpp"

namespace rgpu {

struct Physical : Object {
  Physical() : Object(Kind::physical) {}
  CUmemAllocationProp prop{};
  std::uint64_t size = 0;
  CUdevice owner = 0;     // whose window it is mapped in, and whose quota has it
  int device = 0;         // the session's number of that
  int references = 1;     // the program's; guarded by Virtual::lock, as is what follows
  std::uint64_t mapped = 0;  // its home, where the program sees it; 0: it does not
  std::uint64_t kept = 0;    // its home, where the program does not see it; 0: it does, or there are no bytes yet
  unsigned aliases = 0;      // mappings beside the one at home
  std::uint64_t imported = 0;     // another process's: where its bytes are, in room of ours; it has no home
  std::optional<IpcToken> token;  // what other processes show for it …
  std::uint64_t token_of = 0;     // … while it is at home as this mapping (Mapped::id)

  bool in_host() const { return prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE; }
  std::uint64_t home() const { return mapped ? mapped : kept; }
};

struct Mapped {
  std::uint64_t size = 0;
  Physical* physical = nullptr;
  std::uint64_t id = 0;
  std::map<int, CUmemAccess_flags> access;  // by CUdevice
  bool alias = false;
};

struct Reserved {
  std::uint64_t size = 0;
  bool ours = false;  // for kept bytes: the program does not know of it
};

struct Virtual {
  std::mutex changes;      // one thread maps, unmaps or releases at a time, and may wait for the server meanwhile
  std::shared_mutex lock;  // behind the journal's section, before memory.cpp's
  std::map<std::uint64_t, Reserved> reserved;  // by address
  std::map<std::uint64_t, Mapped> mapped;
  std::map<std::uint64_t, Physical*> kept;
  std::uint64_t next_id = 1ull << 41;
};

Virtual& virtual_memory();

template <class Map>
auto at_or_before(Map& map, std::uint64_t address) {
  auto it = map.upper_bound(address);
  return it == map.begin() ? map.end() : --it;
}

inline bool whole_granules(std::uint64_t size) { return size != 0 && size % kGranule == 0; }

// The lowest free address in the window of a device. Lock held.
std::optional<std::uint64_t> room(const Virtual& v, int device, std::uint64_t size, std::uint64_t alignment, std::uint64_t wish);
// Whether [address, address+size) lies in one reservation of the program's. Lock held.
bool in_reservation(Virtual& v, std::uint64_t address, std::uint64_t size);
// The mappings that tile [address, address+size) exactly; empty where they do not. Lock held.
std::vector<std::uint64_t> tiles(Virtual& v, std::uint64_t address, std::uint64_t size);
// vmm_share.cpp: maps an imported handle, where nothing is. Virtual::changes held, its lock not.
CUresult map_imported(Virtual& v, Physical& physical, std::uint64_t address);
CUresult check_prop(const CUmemAllocationProp& prop);
bool is_host_location(const CUmemLocation& location);

}  // namespace rgpu
