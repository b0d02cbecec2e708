// Reports to the agent beside the journal: bytes in use, on a page that both map, and the names of refused functions
// that the program called (docs/developers/links/shim-link.md, "Unix socket, shim ↔ agent").
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "session.hpp"

namespace rgpu {
namespace {

struct Report {
  std::mutex lock;              // guards `names` and `open`
  std::set<std::string> names;  // refused functions that were called
  bool open = false;            // reports can be sent to the agent
  std::atomic<std::uint64_t>* used = nullptr;  // by session device; set once, before the session is live
};

Report& report() {
  static auto* r = new Report;  // never destroyed: static destructors of the program may call CUDA
  return *r;
}

static_assert(wire::kUsageAwaitedOffset + 16 * wire::kUsageAwaited <= wire::kUsagePageSize);
static_assert(sizeof(std::atomic<std::uint64_t>) == 8 && std::atomic<std::uint64_t>::is_always_lock_free);

void tell_name(Session& s, const std::string& name) {
  send_message(s, wire::kUnsupported, name.data(), name.size());
}

}  // namespace

CUresult open_report(Session& s) {
  Report& r = report();
  const int fd = ::memfd_create("rgpu-usage", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  void* page = MAP_FAILED;
  if (!::posix_fallocate(fd, 0, wire::kUsagePageSize) &&
      !::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
    page = ::mmap(nullptr, wire::kUsagePageSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) {
    ::close(fd);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  ::madvise(page, wire::kUsagePageSize, MADV_DONTFORK);
  std::memcpy(page, wire::kUsageMagic, 8);
  r.used = reinterpret_cast<std::atomic<std::uint64_t>*>(static_cast<std::uint8_t*>(page) + wire::kUsageOffset);
  send_message(s, wire::kUsage, nullptr, 0, fd);
  ::close(fd);
  std::lock_guard guard(r.lock);
  r.open = true;
  for (const std::string& name : r.names) tell_name(s, name);
  return CUDA_SUCCESS;
}

void report_used(int device, std::uint64_t bytes) {
  if (auto* used = report().used; used && device >= 0 && device < kMaxDevices)
    used[device].store(bytes, std::memory_order_relaxed);
}

void report_managed(int waiting) {
  auto* used = report().used;
  if (!used) return;
  auto* words = used + (wire::kUsageManagedOffset - wire::kUsageOffset) / sizeof *used;
  if (waiting > 0) words[0].fetch_add(1, std::memory_order_relaxed);
  words[1].fetch_add(static_cast<std::uint64_t>(std::int64_t{waiting}), std::memory_order_relaxed);
}

void report_awaited(std::uint16_t call, std::uint64_t ns) {
  auto* used = report().used;
  if (!used || call >= wire::kUsageAwaited) return;
  auto* words = used + (wire::kUsageAwaitedOffset - wire::kUsageOffset) / sizeof *used + 2 * std::size_t{call};
  words[0].fetch_add(1, std::memory_order_relaxed);
  words[1].fetch_add(ns, std::memory_order_relaxed);
}

void report_unsupported(const char* name) {
  Session& s = session();
  if (s.forked) return;
  Report& r = report();
  std::lock_guard guard(r.lock);
  if (r.names.insert(name).second && r.open && !s.gone) tell_name(s, name);
}

}  // namespace rgpu
