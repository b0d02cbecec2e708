#include "members.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "address_ranges.hpp"
#include "copies.hpp"
#include "slots.hpp"

extern "C" __attribute__((visibility("default"))) rgpu::RouterFacts rgpu_router_facts;
rgpu::RouterFacts rgpu_router_facts;

namespace rgpu::router {
namespace {

constexpr unsigned kMost = 64;

std::atomic<Member*> table[kMost];
std::atomic<unsigned> highest{0};  // one more than the highest number that is loaded

std::mutex& loading() {
  static auto* lock = new std::mutex;
  return *lock;
}

// Before any copy is loaded: constructors of copies read the facts.
[[gnu::constructor]] void begin() {
  const char* text = std::getenv("RGPU_LIST");
  const long told = text ? std::strtol(text, nullptr, 10) : 1;
  rgpu_router_facts.members = static_cast<unsigned>(std::clamp(told, 1l, static_cast<long>(kMost)));
  rgpu_router_facts.learned = [](unsigned number) {
    if (const Member* member = loaded(number)) received(*member);
  };
  rgpu_router_facts.pinned_error = reserve(kPinnedBase, kPinnedSize);
  for (unsigned d = 0; d < kSessionDevices; ++d)
    rgpu_router_facts.device_error[d] = reserve(kDeviceBase + d * kDeviceStride, kDeviceStride);
  rgpu_router_facts.slot = replace_slot;
}

// The path of the driver library, which is above this one's folder.
std::string library_path() {
  Dl_info info{};
  if (!::dladdr(reinterpret_cast<const void*>(&library_path), &info) || !info.dli_fname) return {};
  std::string path = info.dli_fname;
  for (int up = 0; up < 2; ++up) path.resize(std::min(path.size(), path.rfind('/')));
  return path + "/libcuda.so.1";
}

// How many bytes of the library the loader maps: what is behind them, debugging information mostly, is longer.
off_t mapped_bytes(int fd, off_t whole) {
  Elf64_Ehdr head{};
  if (::pread(fd, &head, sizeof head, 0) != sizeof head || head.e_phentsize != sizeof(Elf64_Phdr)) return whole;
  off_t end = 0;
  for (unsigned i = 0; i < head.e_phnum; ++i) {
    Elf64_Phdr part{};
    const auto at = static_cast<off_t>(head.e_phoff + i * sizeof part);
    if (::pread(fd, &part, sizeof part, at) != sizeof part) return whole;
    end = std::max(end, static_cast<off_t>(part.p_offset + part.p_filesz));
  }
  return std::min(end, whole);
}

// Copies the library into memory: the loader takes the same file for the same library.
int copy_of(const std::string& path) {
  const int from = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const int to = ::memfd_create("libcuda.so.1", MFD_CLOEXEC);
  struct stat about{};
  bool done = from >= 0 && to >= 0 && !::fstat(from, &about);
  for (off_t left = done ? mapped_bytes(from, about.st_size) : 0; done && left > 0;) {
    const ssize_t n = ::sendfile(to, from, nullptr, static_cast<std::size_t>(left));
    done = n > 0;
    left -= n;
  }
  if (from >= 0) ::close(from);
  if (!done && to >= 0) ::close(to);
  return done ? to : -1;
}

// Loads a copy; nullptr with the reason in `why`. The lock is held.
Member* make(unsigned number, std::string& why) {
  const std::string path = library_path();
  const int fd = copy_of(path);
  if (fd < 0) {
    why = "cannot copy " + path + " (" + std::strerror(errno) + ")";
    return nullptr;
  }
  // The loader remembers names, and descriptors' numbers come again: each name has another number of slashes.
  const std::string name = "/proc/self/fd" + std::string(number + 1, '/') + std::to_string(fd);
  rgpu_router_facts.loading = number;
  void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  ::close(fd);
  if (!library) {
    why = ::dlerror();
    return nullptr;
  }
  auto* member = new Member;
  member->number = number;
  for (unsigned i = 0; i < kFunctions; ++i) member->functions[i] = ::dlsym(library, kNames[i]);
  member->table = static_cast<const MemberTable*>(table_of(*member, kMemberTable));
  if (!member->table || member->table->size != sizeof(MemberTable)) {
    why = path + " is not the one that belongs to this library";
    delete member;
    return nullptr;
  }
  member->handles = reinterpret_cast<std::uintptr_t>(member->table->handles);
  return member;
}

struct Stack {
  std::vector<Entry> entries;
};
thread_local constinit Stack* own_stack = nullptr;

void end_thread(void* made) {
  own_stack = nullptr;
  delete static_cast<Stack*>(made);
}

}  // namespace

unsigned members() { return rgpu_router_facts.members; }

Member* loaded(unsigned number) { return number < kMost ? table[number].load(std::memory_order_acquire) : nullptr; }

Member* load(unsigned number) {
  if (Member* member = loaded(number)) return member;
  if (number >= members()) return nullptr;
  std::lock_guard guard(loading());
  if (Member* member = loaded(number)) return member;
  std::string why;
  Member* made = make(number, why);
  if (!made) {
    complain(("the driver library cannot be loaded for member " + std::to_string(number) + ": " + why).c_str());
    return nullptr;
  }
  if (number) CALL(*made, cuInit)(0);  // of the first, the program calls it
  table[number].store(made, std::memory_order_release);
  highest.store(std::max(highest.load(), number + 1));
  return made;
}

Member& first() {
  Member* member = load(0);
  if (member) return *member;
  std::abort();  // the program cannot have any driver; the reason stands on stderr
}

std::vector<Entry>& stack() {
  static pthread_key_t key = [] {
    pthread_key_t made{};
    ::pthread_key_create(&made, end_thread);
    return made;
  }();
  if (!own_stack) {
    own_stack = new Stack;
    ::pthread_setspecific(key, own_stack);
  }
  return own_stack->entries;
}

// ---------------------------------------------------------------- whom a call concerns

namespace {

Member* current_member() {
  auto& entries = stack();
  return entries.empty() ? nullptr : entries.back().member;
}

Where here_or(Member* member) {
  Member* mine = current_member();
  if (!member || member == mine) return {mine ? mine : &first(), false};
  return {member, true};
}

}  // namespace

Where current() { return here_or(nullptr); }

Where of_device(CUdevice device) {
  const int number = first().table->member_of(device);
  Member* member = number < 0 ? nullptr : load(static_cast<unsigned>(number));
  return {member ? member : &first(), false};
}

Member* holder(const void* handle) {
  if (Member* mine = current_member(); mine && mine->has(handle)) return mine;
  for (unsigned i = 0, n = highest.load(std::memory_order_acquire); i < n; ++i)
    if (Member* member = loaded(i); member && member->has(handle)) return member;
  return nullptr;
}

Where of_handles(std::initializer_list<std::uintptr_t> handles) {
  for (std::uintptr_t handle : handles)
    if (handle > 2)
      if (Member* member = holder(reinterpret_cast<const void*>(handle))) return here_or(member);
  return here_or(nullptr);
}

bool is_module_variable(std::uint64_t address) {
  const std::uint64_t offset = address - kDeviceBase;
  return offset < kSessionDevices * kDeviceStride && offset % kDeviceStride >= kAllocationSize;
}

Member* owner(std::uint64_t address) {
  if (const std::uint64_t offset = address - kDeviceBase; offset < kSessionDevices * kDeviceStride) {
    const std::uint64_t within = offset % kDeviceStride;
    if (within >= kAllocationSize) return nullptr;  // a module's variable: each member's have the same addresses
    const bool reserved = within >= kReserveOffset;
    const std::uint64_t at = reserved ? within - kReserveOffset : within;
    return loaded(static_cast<unsigned>(at / part_of(reserved ? kReserveSize : kReserveOffset, members())));
  }
  return pinned_owner(reinterpret_cast<const void*>(address));
}

Member* pinned_owner(const void* address) {
  const std::uint64_t offset = reinterpret_cast<std::uint64_t>(address) - kPinnedFirst;
  return offset < kPinnedRoom ? loaded(static_cast<unsigned>(offset / part_of(kPinnedRoom, members()))) : nullptr;
}

Where of_address(std::uint64_t address) {
  if (Member* member = owner(address)) return here_or(member);
  return is_module_variable(address) ? current() : of_host(reinterpret_cast<const void*>(address));
}

Where in_context(Where where) { return here_or(where.member); }

Where of_host(const void* address) {
  if (Member* member = pinned_owner(address)) return here_or(member);
  for (unsigned i = 0, n = highest.load(std::memory_order_acquire); i < n; ++i)
    if (Member* member = loaded(i); member && member->last.load() && member->table->registered(address))
      return here_or(member);
  return here_or(nullptr);
}

Borrowed::Borrowed(Where where) : member_(where.member) {
  if (!where.borrow) return;
  CUcontext context = member_->last.load(std::memory_order_acquire);
  pushed_ = context && CALL(*member_, cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
}

Borrowed::Borrowed(Member& member, CUcontext context) : member_(&member) {
  pushed_ = context && CALL(member, cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
}

Borrowed::~Borrowed() {
  CUcontext popped;
  if (pushed_) CALL(*member_, cuCtxPopCurrent_v2)(&popped);
}

CUresult refused(unsigned function) { return reinterpret_cast<CUresult (*)()>(first().functions[function])(); }

void complain(const char* text) {
  static std::mutex lock;
  static auto* said = new std::set<std::string>;
  std::lock_guard guard(lock);
  if (said->insert(text).second) std::fprintf(stderr, "rgpu: %s\n", text);
}

}  // namespace rgpu::router
