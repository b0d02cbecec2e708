// Support of read(), write() and similar calls on managed memory that is not present. The kernel finds a protected page
// and returns EFAULT; no signal is raised. userfaultfd would report it, but not to a process without privileges
// (vm.unprivileged_userfaultfd), and fetching everything at each synchronisation would cost its transfer each time. So
// a filter stops such a call whose buffer lies in a device's range; a thread of ours makes the buffer present and lets
// the call continue (seccomp user notification, Linux 5.7). Other calls only cost the filter.
//
// The filter is inherited by child processes, for buffers in these ranges, which are reserved in programs with this
// library.
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "managed.hpp"
#include "session.hpp"

#ifndef SECCOMP_USER_NOTIF_FLAG_CONTINUE
#define SECCOMP_USER_NOTIF_FLAG_CONTINUE 1u
#endif
#ifndef SECCOMP_FILTER_FLAG_TSYNC_ESRCH
#define SECCOMP_FILTER_FLAG_TSYNC_ESRCH (1UL << 4)
#endif

namespace rgpu {
namespace {

struct Form {
  long number;
  unsigned buffer, length;  // arguments
  bool write;               // the kernel writes the buffer
};
constexpr Form kForms[] = {
    {SYS_read, 1, 2, true},     {SYS_pread64, 1, 2, true},  {SYS_recvfrom, 1, 2, true}, {SYS_getrandom, 0, 1, true},
    {SYS_write, 1, 2, false},   {SYS_pwrite64, 1, 2, false}, {SYS_sendto, 1, 2, false},
};
constexpr std::uint32_t kLow = kDeviceBase >> 32, kHigh = (kDeviceBase + kSessionDevices * kDeviceStride) >> 32;
static_assert((kDeviceBase & 0xFFFFFFFF) == 0 && (kDeviceStride & 0xFFFFFFFF) == 0);

int listener = -1;

std::vector<sock_filter> program() {
  std::vector<sock_filter> code;
  const auto load = [&](std::size_t at) { code.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(at))); };
  load(offsetof(seccomp_data, arch));
  code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0));
  code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  for (const Form& form : kForms) {
    load(offsetof(seccomp_data, nr));
    code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(form.number), 0, 4));
    load(offsetof(seccomp_data, args) + 8 * form.buffer + 4);  // its upper half
    code.push_back(BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, kLow, 0, 2));
    code.push_back(BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, kHigh, 1, 0));
    code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF));
  }
  code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  return code;
}

void go_on(std::uint64_t id) {
  seccomp_notif_resp answer{};
  answer.id = id;
  answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
  ::ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);  // fails when the call was interrupted: it is notified again
}

void serve(const seccomp_notif& call) {
  const Form* form = nullptr;
  for (const Form& each : kForms)
    if (each.number == call.data.nr) form = &each;
  const bool here = !::syscall(SYS_tgkill, ::getpid(), call.pid, 0);  // a child's memory is its own
  if (!form || !here) return go_on(call.id);
  const std::uint64_t buffer = call.data.args[form->buffer];
  const std::uint64_t length = std::min<std::uint64_t>(call.data.args[form->length], kDeviceStride);
  if (managed_is_present(buffer, length, form->write)) return go_on(call.id);
  const bool waits = static_cast<long>(call.pid) != host_function_thread();
  const auto bring = [id = call.id, buffer, length, write = form->write, waits] {
    touch_managed(buffer, length, write, waits);
    go_on(id);
  };
  try {
    std::thread(bring).detach();  // a waiting one must not block one that it waits for
  } catch (const std::system_error&) {
    bring();
  }
}

void* run(void*) {
  ::pthread_setname_np(::pthread_self(), "rgpu-syscalls");
  for (;;) {
    seccomp_notif call{};
    if (!::ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &call))
      serve(call);
    else if (errno != EINTR && errno != ENOENT)
      return nullptr;
  }
}

const char* install() {
  std::vector<sock_filter> code = program();
  sock_fprog filter{static_cast<unsigned short>(code.size()), code.data()};
  constexpr unsigned long flags =
      SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_TSYNC | SECCOMP_FILTER_FLAG_TSYNC_ESRCH | SECCOMP_FILTER_FLAG_SPEC_ALLOW;
  long fd = ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &filter);
  if (fd < 0 && errno == EACCES && !::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    fd = ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &filter);
  if (fd < 0) return std::strerror(errno);
  listener = static_cast<int>(fd);
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  pthread_t thread;
  const int failed = ::pthread_create(&thread, nullptr, run, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failed) return "no thread";
  ::pthread_atfork(nullptr, nullptr, [] { ::close(listener); });  // without listeners such a call of a child's fails
  ::pthread_detach(thread);
  return nullptr;
}

}  // namespace

void watch_system_calls() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* wanted = std::getenv("RGPU_MANAGED_SYSTEM_CALLS");
    if (wanted && !std::strcmp(wanted, "0")) return;
    if (const char* why = install())
      log_line("system calls on managed memory need it to be touched first: no filter can be set: %s", why);
  });
}

}  // namespace rgpu
