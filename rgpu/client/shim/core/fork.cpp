// Effects of a session on its process: address ranges reserved at load (SEMANTICS 8), fork (SEMANTICS 16), exit.
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "address_ranges.hpp"
#include "routed.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

int pinned_error = 0;                   // errno of the pinned range's reservation
int device_error[kSessionDevices] = {};  // … of each device's

void before_fork() {
  Session& s = session();
  s.life_lock.lock();
  s.segments_lock.lock();
}

void in_parent() {
  Session& s = session();
  s.segments_lock.unlock();
  s.life_lock.unlock();
}

// Runs in the child of a process with a session: the parent's agent must not see this process through inherited
// descriptors, and no CUDA function works here any more.
void in_child() {
  Session& s = session();
  if (s.state != Session::State::fresh) {
    s.forked = true;
    forget_device_text();
    for (auto& [index, segment] : s.segments)
      if (segment->fd >= 0) ::close(segment->fd);
    for (auto& segment : s.preallocated)
      if (segment->fd >= 0) ::close(segment->fd);
    if (s.socket >= 0) ::close(s.socket);
    if (s.wake >= 0) ::close(s.wake);
    if (s.ring.doorbell >= 0) ::close(s.ring.doorbell);
    s.ring.size = 0;  // its mappings are not here (MADV_DONTFORK)
    s.ring.doorbell = -1;
    s.socket = s.wake = -1;
    s.sleeping = nullptr;
  }
  s.segments_lock.unlock();
  s.life_lock.unlock();
}

__attribute__((constructor)) void loaded() {
  if (const RouterFacts* router = router_facts()) {  // the routing library has reserved them for all of its copies
    pinned_error = router->pinned_error;
    std::copy(std::begin(router->device_error), std::end(router->device_error), device_error);
  } else {
    pinned_error = reserve(kPinnedBase, kPinnedSize);
    for (unsigned d = 0; d < kSessionDevices; ++d)
      device_error[d] = reserve(kDeviceBase + d * kDeviceStride, kDeviceStride);
  }
  ::pthread_atfork(before_fork, in_parent, in_child);
}

// Runs at the end of the process. Never waits for the agent: the few bytes are dropped where the socket does not take
// them.
__attribute__((destructor)) void unloaded() {
  Session& s = session();
  if (!s.forked) print_last_device_text();
  if (s.forked || s.state != Session::State::live || s.gone || s.pid != ::getpid()) return;
  const std::uint32_t goodbye[3] = {4, wire::kGoodbye, 0};
  if (!s.send_lock.try_lock()) return;
  [[maybe_unused]] ssize_t ignored = ::send(s.socket, goodbye, sizeof goodbye, MSG_NOSIGNAL | MSG_DONTWAIT);
  s.send_lock.unlock();
}

}  // namespace

bool address_ranges_reserved(unsigned devices, std::string& why) {
  if (devices > kSessionDevices) {
    why = "a session of more than " + std::to_string(kSessionDevices) + " devices has no room in this address space";
    return false;
  }
  int error = pinned_error;
  for (unsigned d = 0; d < devices; ++d) error = error ? error : device_error[d];
  if (!error) return true;
  why = std::string("the session's address ranges are not free in this process (") + std::strerror(error) +
        "): is a limit on address space (ulimit -v) set?";
  return false;
}

}  // namespace rgpu
