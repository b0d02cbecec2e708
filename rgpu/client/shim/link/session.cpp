// The session's life: cuInit, what every call requires, the sticky error, the end.
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "memory.hpp"
#include "session.hpp"

extern char** environ;

namespace rgpu {
namespace {

// Publishes the first record of every journal: the environment variables that a driver reads when a context is made.
CUresult open_session(Session& s) {
  std::string environment;
  for (char** at = environ; at && *at; ++at) {
    if (std::strncmp(*at, "CUDA_", 5) && std::strncmp(*at, "NVIDIA_", 7)) continue;
    environment.append(*at);
    environment.push_back('\0');
    if (environment.size() > 64 * 1024) break;
  }
  wire::SessionOpen call{};
  call.version = 1;
  call.pid = static_cast<std::uint32_t>(s.pid);
  call.environment = {environment.data(), static_cast<std::uint32_t>(environment.size())};
  return submit(call);
}

// Threads of ours run this library's code until the process ends: it must not be unloaded.
void stay_loaded() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(&initialise), &info) && info.dli_fname)
    ::dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

// Opens the session, except its state: the work of cuInit, and in a gang of the first context.
CUresult open_link(Session& s) {
  if (CUresult r = connect_agent(s); r) return r;
  s.told = true;
  std::string why;
  if (!address_ranges_reserved(static_cast<unsigned>(s.facts.devices.size()), why)) {
    log_once("ranges", "%s", why.c_str());
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  s.pid = ::getpid();
  stay_loaded();
  if (CUresult r = open_report(s); r) return r;
  return join_run();
}

CUresult go_live(Session& s) {
  const char* list = std::getenv("RGPU_LIST");
  if (list && *list) {
    if (CUresult r = fetch_list(s); r) return r;
    s.pid = ::getpid();
    s.state = Session::State::live;
    return CUDA_SUCCESS;
  }
  if (CUresult r = open_link(s); r) return r;
  s.state = Session::State::live;
  return open_session(s);
}

}  // namespace

Session& session() {
  static auto* s = new Session;  // never destroyed: static destructors of the program may call CUDA
  return *s;
}

CUresult initialise() {
  Session& s = session();
  if (s.forked) return CUDA_ERROR_NOT_INITIALIZED;
  std::lock_guard guard(s.life_lock);
  if (s.state == Session::State::fresh) {
    s.failure = go_live(s);
    // A failure before anything is shared is temporary (the agent may not be there yet); later ones are permanent.
    if (s.failure && s.state == Session::State::live) s.state = Session::State::failed;
  }
  return s.state == Session::State::live && s.gone ? CUDA_ERROR_SYSTEM_NOT_READY : s.failure;
}

bool initialised() {
  Session& s = session();
  return !s.forked && s.state == Session::State::live;
}

const Facts& facts() {
  Session& s = session();
  return s.listing && !s.told ? s.list : s.facts;  // other threads read while a first context opens the session
}

bool listed() { return session().listing; }

const std::vector<DeviceFacts>& program_devices() {
  Session& s = session();
  return s.listing ? s.listed : s.facts.devices;
}

bool other_member(int number) {
  Session& s = session();
  return s.listing && s.member >= 0 && s.member != s.listed[static_cast<std::size_t>(number)].attribute(kMemberAttribute);
}

CUresult choose_device(int number) {
  Session& s = session();
  if (!s.listing) return CUDA_SUCCESS;
  const int member = s.listed[static_cast<std::size_t>(number)].attribute(kMemberAttribute);
  if (s.member == member) return CUDA_SUCCESS;
  std::lock_guard guard(s.life_lock);
  if (s.forked) return CUDA_ERROR_NOT_INITIALIZED;
  if (s.member < 0) {
    s.chosen = number;
    if (CUresult r = open_link(s); r) return r;
    s.member = member;
    return open_session(s);
  }
  if (s.member == member) return CUDA_SUCCESS;
  log_once("two members", "device %d of the list belongs to another member of the gang than device %d, which this "
           "process uses (%s): a process uses the devices of one rank; start a "
           "process for each rank, or ask for more devices of a rank with --gpus", number, s.chosen,
           s.facts.name.c_str());
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult require_session() {
  Session& s = session();
  if (s.forked || s.state != Session::State::live) return CUDA_ERROR_NOT_INITIALIZED;
  return s.gone ? CUDA_ERROR_SYSTEM_NOT_READY : CUDA_SUCCESS;
}

CUresult require() {
  if (CUresult r = require_session(); r) return r;
  return static_cast<CUresult>(session().sticky.load(std::memory_order_relaxed));
}

void set_sticky(CUresult error) {
  int none = 0;
  if (error && session().sticky.compare_exchange_strong(none, error))
    log_line("error %d sticks to the session", static_cast<int>(error));
}

std::uint32_t thread_number() {
  static std::atomic<std::uint32_t> next{0};
  static thread_local std::uint32_t mine = ~0u;
  if (mine == ~0u) mine = next.fetch_add(1);
  return mine;
}

int DeviceFacts::attribute(int which, int otherwise) const {
  auto it = std::lower_bound(attributes.begin(), attributes.end(), which,
                             [](const auto& entry, int wanted) { return entry.first < wanted; });
  return it != attributes.end() && it->first == which ? it->second : otherwise;
}

}  // namespace rgpu
