// The processes of a run share its memory quota: each has a quota of all of it, and a slot on a page that all map, in
// which it records its use. A process that takes more first records that and then reads the sum, so that two processes
// that take the last bytes at once may both be refused, and never both succeed. The agent makes the page, a file beside
// its socket, and clears the slot of a process that ended (rgpu/client/run/run_memory.py has the layout).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "memory.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

using Word = std::atomic<std::uint64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free);

constexpr std::size_t kSlots = 1024, kSlotWords = 8, kPageSize = kSlots * kSlotWords * 8;
constexpr int kSharedDevices = kSlotWords - 1;  // the last word identifies the slot's process
constexpr char kMagic[8] = {'R', 'G', 'P', 'U', 'R', 'U', 'N', '1'};

struct RunMemory {
  Word* page = nullptr;  // its first slot is the header; null: an older agent, nothing is shared
  Word* own = nullptr;
};

RunMemory& run() {
  static auto* r = new RunMemory;
  return *r;
}

bool mine() {
  RunMemory& r = run();
  return r.own && r.own[kSharedDevices].load() == facts().session_number;
}

}  // namespace

CUresult join_run() {
  const char* socket = std::getenv("RGPU_AGENT");
  std::string path = socket ? socket : "";
  path = path.substr(0, path.rfind('/') + 1) + "memory";
  if (listed()) {  // the members of a gang have separate quotas
    const auto chosen = static_cast<std::size_t>(session().chosen);
    path += "." + std::to_string(program_devices()[chosen].attribute(kMemberAttribute));
  }
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return CUDA_SUCCESS;
  void* page = ::lseek(fd, 0, SEEK_END) < static_cast<off_t>(kPageSize)
                   ? MAP_FAILED
                   : ::mmap(nullptr, kPageSize, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (page == MAP_FAILED || std::memcmp(page, kMagic, sizeof kMagic)) {
    log_once("run memory", "%s cannot be used: do agent and library have the same version?", path.c_str());
    return CUDA_ERROR_SYSTEM_NOT_READY;
  }
  ::madvise(page, kPageSize, MADV_DONTFORK);
  RunMemory& r = run();
  auto* words = static_cast<Word*>(page);
  for (std::size_t slot = 1; slot < kSlots; ++slot) {
    std::uint64_t nobody = 0;
    if (words[slot * kSlotWords + kSharedDevices].compare_exchange_strong(nobody, facts().session_number)) {
      r.page = words;
      r.own = words + slot * kSlotWords;
      return CUDA_SUCCESS;
    }
  }
  log_once("run memory", "more than %zu processes of one run use GPUs", kSlots - 1);
  return CUDA_ERROR_SYSTEM_NOT_READY;
}

void share_used(int device, std::uint64_t bytes) {
  if (device >= 0 && device < kSharedDevices && mine()) run().own[device].store(bytes);
}

std::uint64_t used_by_run(int device, std::uint64_t own) {
  RunMemory& r = run();
  if (!r.page || device < 0 || device >= kSharedDevices) return own;
  std::uint64_t all = own;
  for (std::size_t slot = 1; slot < kSlots; ++slot)
    if (const Word* other = r.page + slot * kSlotWords; other != r.own && other[kSharedDevices].load())
      all += other[device].load();
  return all;
}

}  // namespace rgpu
