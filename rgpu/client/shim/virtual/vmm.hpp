// State of virtual memory management that its files share: reservations, handles, mappings.
//
// Reservations are made in a window of the session's own range (kReserveOffset behind the device's base), so that
// mapped memory keeps its addresses on every server.
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
  CUdevice owner = 0;     // the device whose window it is mapped in, and whose quota counts it
  int device = 0;         // the session's number of the owner
  int references = 1;     // the program's; guarded by Virtual::lock, like the fields below
  std::uint64_t mapped = 0;  // its home, visible to the program; 0: not visible
  std::uint64_t kept = 0;    // its home, invisible to the program; 0: visible, or there are no bytes yet
  unsigned aliases = 0;      // mappings beside the home
  std::uint64_t imported = 0;     // another process's: address of its bytes, a reservation of ours; no home
  std::optional<IpcToken> token;  // presented by other processes to open it …
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
  bool ours = false;  // for kept bytes: invisible to the program
};

struct Virtual {
  std::mutex changes;      // one thread maps, unmaps or releases at a time, and may wait for the server meanwhile
  std::shared_mutex lock;  // locked after the journal's section, before memory.cpp's
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
// vmm_share.cpp: maps an imported handle, where nothing is mapped. Virtual::changes held, its lock not.
CUresult map_imported(Virtual& v, Physical& physical, std::uint64_t address);
CUresult check_prop(const CUmemAllocationProp& prop);
bool is_host_location(const CUmemLocation& location);

}  // namespace rgpu
