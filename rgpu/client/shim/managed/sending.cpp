// Before work of the device: sends the bytes that the CPU changed, and closes the program's pages until they are
// touched.
//
// The copies are made on a stream of our own, the carrier, and the program's streams wait for them by an event. No
// unfinished work of the program's uses the bytes sent: the CPU could change them because all such work was complete.
// The journal contains the copies with their bytes, so that a replay needs nothing of the program.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "managed.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::size_t kMostUses = 256;
constexpr std::size_t kMostUnits = (4u << 20) / kUnit;  // of one call: its payload's segment is soon released

// Copies the managed parts of the units to the device. Lock held.
CUresult publish_units(Managed& m, ManagedRegion& region, std::size_t from, std::size_t to) {
  Carrier* carrier = nullptr;
  if (CUresult r = carrier_of(m, *region.context, carrier); r) return r;
  const std::uint64_t begin = from * kUnit, end = begin + region.bytes(from, to);
  std::uint64_t last = 0;
  for (const ManagedPiece& piece : region.pieces) {
    const std::uint64_t first = std::max(begin, piece.offset), behind = std::min(end, piece.offset + piece.size);
    if (first >= behind) continue;
    wire::MemcpyH2d call{};
    call.destination = region.base + first;
    call.stream = carrier->stream.number;
    Payload payload(region.alias + first, behind - first);
    if (CUresult r = submit_work(carrier->stream, call, payload, &last); r) return r;
  }
  if (last) sent(*carrier, last);
  return CUDA_SUCCESS;
}

// Makes the stream's next work wait for all copies on the carriers. Lock held.
CUresult join_carriers(Managed& m, const StreamRef& stream) {
  for (auto& [context, carrier] : m.carriers) {
    if (!carrier.last) continue;
    if (complete_on(carrier.stream.number, carrier.last)) {
      observed(carrier.last);  // the next calls in the journal rely on it
      carrier.last = 0;
      carrier.joined.clear();
      continue;
    }
    std::uint64_t& joined = carrier.joined[stream.number];
    if (joined >= carrier.last) continue;
    wire::StreamWaitEvent wait{};
    wait.stream = stream.number;
    wait.event = carrier.event;
    if (CUresult r = submit_work(stream, wait); r) return r;
    joined = carrier.last;
  }
  return CUDA_SUCCESS;
}

}  // namespace

void ManagedUse::pointers_in(const std::vector<std::uint8_t>& parameters) {
  if (!any_managed()) return;
  Managed& m = managed();
  for (std::size_t at = 0; at + 8 <= parameters.size(); at += 4) {  // packed structures may align to 4
    std::uint64_t word;
    std::memcpy(&word, parameters.data() + at, sizeof word);
    if (word >= m.lowest.load(std::memory_order_relaxed) && word < m.highest.load(std::memory_order_relaxed))
      ranges_.push_back({word, 0});
  }
}

// Requires the lock.
void ManagedUse::find_parts() {
  Managed& m = managed();
  const auto whole = [&](const std::shared_ptr<ManagedRegion>& region) {
    const bool known = std::any_of(parts_.begin(), parts_.end(), [&](const Part& p) { return p.region == region; });
    if (!known) parts_.push_back({region, 0, region->units.size()});
  };
  if (everything_) {
    std::shared_lock table(m.table);
    for (auto& [base, region] : m.regions) {
      const bool seen = region->attached == CU_MEM_ATTACH_GLOBAL ||
                        (region->attached == CU_MEM_ATTACH_SINGLE && region->stream == stream_.number);
      if (seen && region->at_host) whole(region);
    }
  }
  for (const ManagedPiece& range : ranges_) {
    if (everything_) {  // a pointer: to anywhere in the region
      if (auto region = managed_region(range.offset)) whole(region);
      continue;
    }
    for (auto& region : managed_regions(range.offset, range.size)) {
      const std::uint64_t begin = std::max(range.offset, region->base) - region->base;
      const std::uint64_t end = std::min(range.offset + range.size - region->base, region->size);
      parts_.push_back({region, begin / kUnit, (end + kUnit - 1) / kUnit});
    }
  }
}

// A thread that touches the part from here on waits until the use is recorded, so the part is unchanged while the lock
// is released.
CUresult ManagedUse::send(const Part& part, std::unique_lock<std::mutex>& guard) {
  ManagedRegion& region = *part.region;
  bool closed = false;
  for (std::size_t at = part.from; at < part.to && region.at_host && !region.ended;) {
    if (region.units[at] == Newest::device) {
      ++at;
      continue;
    }
    if (!closed) {  // before the first byte is read: later writes are ordered after the work
      if (!protect(region, part.from, part.to, Newest::device))  // vm.max_map_count reached
        return part.to - part.from == region.units.size() ? CUDA_ERROR_OPERATING_SYSTEM
                                                          : send({part.region, 0, region.units.size()}, guard);
      closed = true;
    }
    std::size_t end = at;
    const Newest newest = region.units[at];
    while (end < part.to && region.units[end] == newest && (newest == Newest::both || end - at < kMostUnits)) ++end;
    if (newest == Newest::host) {
      guard.unlock();
      wait_for_space(session(), false);  // with no lock held
      guard.lock();
      if (region.ended) return CUDA_SUCCESS;
      ReservedSpace space;
      if (CUresult r = publish_units(managed(), region, at, end); r) return r;
    }
    for (; at < end; ++at) {
      if (region.units[at] != Newest::device) --region.at_host;
      region.units[at] = Newest::device;
    }
  }
  return CUDA_SUCCESS;
}

CUresult ManagedUse::upload() {
  if (!any_managed() || (!everything_ && ranges_.empty())) return CUDA_SUCCESS;
  watch_faults();
  Managed& m = managed();
  std::unique_lock guard(m.lock);
  find_parts();
  if (!everything_ && parts_.empty()) return CUDA_SUCCESS;
  ++m.giving;
  begun_ = true;
  for (const Part& part : parts_)
    if (CUresult r = send(part, guard); r) return r;
  ReservedSpace space;
  return join_carriers(m, stream_);
}

void ManagedUse::given(std::uint64_t seq) {
  if (!begun_) return;
  Managed& m = managed();
  std::lock_guard guard(m.lock);
  const auto raise = [&](std::map<std::uint64_t, std::uint64_t>& uses) {
    std::uint64_t& last = uses[stream_.number];
    last = std::max(last, seq);
  };
  if (everything_) raise(m.uses);
  if (m.uses.size() > kMostUses)  // uses of destroyed streams remain where the CPU touches nothing
    std::erase_if(m.uses, [](auto& use) { return complete_on(use.first, use.second) && !observed(use.second); });
  for (const Part& part : parts_) {
    const bool named = !everything_ || part.region->attached == CU_MEM_ATTACH_HOST ||
                       (part.region->attached == CU_MEM_ATTACH_SINGLE && part.region->stream != stream_.number);
    if (named) raise(part.region->uses);
  }
  begun_ = false;
  --m.giving;
  m.given.notify_all();
}

ManagedUse::~ManagedUse() {
  if (!begun_) return;
  Managed& m = managed();
  std::lock_guard guard(m.lock);
  --m.giving;
  m.given.notify_all();
}

}  // namespace rgpu
