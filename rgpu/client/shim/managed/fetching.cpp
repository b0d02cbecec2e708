// A touch of managed memory by the CPU: waits for the work that may use it, and fetches the bytes that are newer at the
// device.
//
// It may run in a signal handler, at any instruction of the program's: it prints nothing, and calls no function of the
// program's. Bytes are received into the alias, and the program's pages are opened when all of them are there.
#include <algorithm>

#include "managed.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

// Units of 64 KiB in a fetch: 256 KiB at first, twice as many each time fetches continue one another.
constexpr std::size_t kFirstUnits = 4, kMostUnits = 128;

// Awaits a call as await_view() does, except for the work of driver calls (printing, deferred frees).
template <class C>
CUresult await_silently(const C& call, void* destination, std::size_t capacity, std::uint64_t& received,
                        const std::function<void(std::uint64_t seq, bool answered)>& step) {
  Answer answer;
  Waiter waiter;
  waiter.answer = &answer;
  waiter.destination = destination;
  waiter.capacity = capacity;
  std::uint64_t seq = 0;
  {
    Section section(true);
    if (CUresult r = section.publish_view(view(call), nullptr, &waiter, &seq); r) return r;
    step(seq, false);
  }
  attend(session(), waiter);
  while (!waiter.done.load(std::memory_order_acquire)) waiter.done.wait(0, std::memory_order_acquire);
  if (answer.result == CUDA_ERROR_SYSTEM_NOT_READY && session().gone) return answer.result;
  received = answer.payload_size;
  if (!answer.result) step(seq, true);
  observed(seq);
  return answer.result;
}

struct Wait {
  std::uint64_t stream = 0, seq = 0;
  bool lost = false;
};

// The work that a touch of the region has to wait for; work known to be complete is recorded in the journal. Lock held.
std::vector<Wait> waits_of(Managed& m, ManagedRegion& region) {
  std::vector<Wait> found;
  const auto take = [&](std::map<std::uint64_t, std::uint64_t>& uses, std::uint64_t only) {
    std::erase_if(uses, [&](auto& use) {
      if (only && use.first != only) return false;
      if (complete_on(use.first, use.second)) {
        observed(use.second);
        return true;
      }
      found.push_back({use.first, use.second, m.lost.contains(use.first)});
      return false;
    });
  };
  take(region.uses, 0);
  if (region.attached == CU_MEM_ATTACH_GLOBAL) take(m.uses, 0);
  if (region.attached == CU_MEM_ATTACH_SINGLE) take(m.uses, region.stream);
  return found;
}

// Waits for one stream's work. No lock held.
CUresult wait_for(const Wait& wait, const ManagedRegion& region) {
  std::uint64_t none = 0;
  if (wait.lost) {
    wire::ContextSynchronize call{};
    call.context = region.context->number;
    return await_silently(call, nullptr, 0, none, [&](std::uint64_t seq, bool answered) {
      if (answered) learned_on(region.device, seq);
    });
  }
  wire::StreamSynchronize call{};
  call.stream = wait.stream;
  const CUresult r = await_silently(call, nullptr, 0, none, [&](std::uint64_t, bool answered) {
    if (answered) learned(wait.stream, wait.seq);
  });
  return r == CUDA_ERROR_INVALID_HANDLE ? wait_for({wait.stream, wait.seq, true}, region) : r;  // destroyed meanwhile
}

// Removes uses that are complete: they are not waited for again. Lock held.
void forget(Managed& m, ManagedRegion& region, const std::vector<Wait>& waits) {
  for (const Wait& wait : waits)
    for (auto* uses : {&region.uses, &m.uses})
      if (auto it = uses->find(wait.stream); it != uses->end() && it->second <= wait.seq) uses->erase(it);
}

// Copies units from the device into the alias. Lock held.
CUresult fetch(Managed& m, ManagedRegion& region, std::size_t from, std::size_t to) {
  Carrier* carrier = nullptr;
  if (CUresult r = carrier_of(m, *region.context, carrier); r) return r;
  const std::uint64_t begin = from * kUnit, end = begin + region.bytes(from, to);
  for (const ManagedPiece& piece : region.pieces) {
    const std::uint64_t first = std::max(begin, piece.offset), behind = std::min(end, piece.offset + piece.size);
    if (first >= behind) continue;
    wire::MemcpyD2h call{};
    call.source = region.base + first;
    call.size = behind - first;
    call.stream = carrier->stream.number;
    std::uint64_t received = 0;
    CUresult r = await_silently(call, region.alias + first, call.size, received, [&](std::uint64_t seq, bool answered) {
      if (answered)
        learned(carrier->stream.number, seq);
      else
        note_work(carrier->stream, seq);
    });
    if (r) return r;
    if (received != call.size) return CUDA_ERROR_UNKNOWN;
  }
  return CUDA_SUCCESS;
}

// Opens units for the program; false where the system refuses another mapping. Lock held.
bool open(ManagedRegion& region, std::size_t from, std::size_t to, Newest newest) {
  if (!protect(region, from, to, newest)) return false;
  for (std::size_t unit = from; unit < to; ++unit) {
    if (region.units[unit] == Newest::device) ++region.at_host;
    region.units[unit] = newest;
  }
  return true;
}

// The end of a fetch that begins at a unit which is newest at the device. Lock held.
std::size_t fetch_end(ManagedRegion& region, std::size_t unit, std::size_t wanted) {
  region.ahead = unit == region.next_fetch && region.ahead ? std::min(2 * region.ahead, kMostUnits) : kFirstUnits;
  const std::size_t most = std::min(region.units.size(), std::max(wanted, unit + region.ahead));
  std::size_t end = unit;
  while (end < most && region.units[end] == Newest::device) ++end;
  return region.next_fetch = end;
}

// Opens the whole region where the system takes no further mapping (vm.max_map_count): fetches all units that are
// newest at the device, and marks all units as changed by the CPU. Lock held.
CUresult open_all(Managed& m, ManagedRegion& region) {
  for (std::size_t unit = 0; unit < region.units.size();) {
    std::size_t end = unit;
    while (end < region.units.size() && region.units[end] == Newest::device) ++end;
    if (end > unit)
      if (CUresult r = fetch(m, region, unit, end); r) return r;
    unit = std::max(end, unit + 1);
  }
  return open(region, 0, region.units.size(), Newest::host) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// Whether a kernel of the program's own failed: the session exists, but its context is lost.
bool kernel_failed(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
      return true;
    default:
      return false;
  }
}

// Gives up fetching from the device. After an error of its own kernels a program may find undefined bytes in managed
// memory: the bytes that the CPU had last; a program that lost its session must not take those for a result.
Touch give_up(ManagedRegion& region, CUresult result) {
  if (!kernel_failed(result)) {
    log_once("managed lost", "managed memory at %#llx cannot be brought back, the session is lost (error %d): the touch "
                             "is a fault of the program", static_cast<unsigned long long>(region.base),
             static_cast<int>(result));
    return Touch::lost;
  }
  log_once("managed stale", "managed memory cannot be fetched (error %d): the CPU sees what it had last",
           static_cast<int>(result));
  return open(region, 0, region.units.size(), Newest::host) ? Touch::present : Touch::lost;
}

struct Waiting {  // counted while it exists
  Waiting() { report_managed(1); }
  ~Waiting() { report_managed(-1); }
};

// Makes the touched units present, one after the other until all are as wanted.
struct Toucher {
  Managed& m;
  ManagedRegion& region;
  const std::size_t from, to;
  const bool write, waits;
  std::optional<Waiting> waiting{};

  bool fine(std::size_t unit) const {
    return region.units[unit] == Newest::host || (!write && region.units[unit] == Newest::both);
  }

  Touch run(std::unique_lock<std::mutex>& guard) {
    for (std::size_t unit = from; unit < to;) {
      if (region.ended) return Touch::elsewhere;
      if (fine(unit)) {
        ++unit;
        continue;
      }
      if (region.units[unit] == Newest::both) {
        std::size_t end = unit;
        while (end < to && region.units[end] == Newest::both) ++end;
        if (!open(region, unit, end, Newest::host))
          if (CUresult r = open_all(m, region); r) return give_up(region, r);
        continue;
      }
      if (!waiting) waiting.emplace();
      if (waits && m.giving) {
        m.given.wait(guard);
        continue;
      }
      if (waits) {
        const auto before = waits_of(m, region);
        guard.unlock();
        CUresult r = CUDA_SUCCESS;
        for (const Wait& wait : before)
          if (!r) r = wait_for(wait, region);
        guard.lock();
        if (r) return give_up(region, r);
        forget(m, region, before);
        if (!before.empty()) continue;
      }
      const std::size_t end = fetch_end(region, unit, to);
      CUresult r = fetch(m, region, unit, end);
      if (!r && !open(region, unit, end, Newest::both)) r = open_all(m, region);
      if (r) return give_up(region, r);
    }
    return Touch::present;
  }
};

}  // namespace

Touch touch_managed(std::uint64_t address, std::uint64_t size, bool write, bool waits) {
  Managed& m = managed();
  ReservedSpace space;
  bool any = false;
  for (const auto& region : managed_regions(address, std::max<std::uint64_t>(size, 1))) {
    const std::uint64_t begin = std::max(address, region->base) - region->base;
    const std::uint64_t end = std::min(address + size - region->base, region->size);
    std::unique_lock guard(m.lock);
    Toucher toucher{m, *region, begin / kUnit, std::max<std::size_t>(begin / kUnit + 1, (end + kUnit - 1) / kUnit), write, waits};
    const Touch touch = toucher.run(guard);
    if (touch == Touch::lost) return touch;
    any |= touch == Touch::present;
  }
  return any ? Touch::present : Touch::elsewhere;
}

bool managed_is_present(std::uint64_t address, std::uint64_t size, bool write) {
  Managed& m = managed();
  for (const auto& region : managed_regions(address, size)) {
    const std::size_t from = (std::max(address, region->base) - region->base) / kUnit;
    const std::size_t to = (std::min(address + size - region->base, region->size) + kUnit - 1) / kUnit;
    std::lock_guard guard(m.lock);
    for (std::size_t unit = from; unit < to && !region->ended; ++unit)
      if (region->units[unit] == Newest::device || (write && region->units[unit] == Newest::both)) return false;
  }
  return true;
}

void ready_to_read(const void* data, std::size_t size) {
  if (size && any_managed()) touch_managed(reinterpret_cast<std::uint64_t>(data), size, false, !in_host_function());
}

void ready_to_write(void* data, std::size_t size) {
  if (size && any_managed()) touch_managed(reinterpret_cast<std::uint64_t>(data), size, true, !in_host_function());
}

}  // namespace rgpu
