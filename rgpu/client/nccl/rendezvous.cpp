// Ranks of one process meet in its memory. Other ranks are looked up through the agent, which sends the request on to
// the pool, repeatedly: a rank's request also reports its arrival.
#include "rendezvous.hpp"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "shim_link.hpp"
#include "state.hpp"

namespace rgpu::nccl {
namespace {

using Clock = std::chrono::steady_clock;

// Threads of this process that arrive within this time cost the pool no request.
constexpr auto kHere = std::chrono::milliseconds(50);
constexpr auto kFirstAgain = std::chrono::milliseconds(20), kLastAgain = std::chrono::milliseconds(1000);
constexpr int kAgentSeconds = 15;  // for one answer of the agent
constexpr std::size_t kMaxBody = 16u << 20;
constexpr std::int32_t kNotReady = 802;  // CUDA_ERROR_SYSTEM_NOT_READY: the request is repeated

// The ranks of a communicator that have arrived in this process. Removed by the last rank that leaves.
struct Gathering {
  std::map<int, Came> came;
  std::size_t left = 0;
};
std::mutex lock;  // guards `gatherings`
std::condition_variable changed;
std::map<std::string, Gathering> gatherings;

std::chrono::seconds patience() {
  const char *text = std::getenv("RGPU_NCCL_TIMEOUT");
  const int seconds = text ? std::atoi(text) : 0;
  return std::chrono::seconds(seconds > 0 ? seconds : 60);
}

bool all_here(const std::string &where, int ranks, Clock::time_point until, std::vector<Came> &came) {
  std::unique_lock guard(lock);
  const auto whole = [&] { return static_cast<int>(gatherings[where].came.size()) >= ranks; };
  const bool done = changed.wait_until(guard, until, whole);
  for (const auto &[rank, one] : gatherings[where].came)
    if (rank < ranks) came[static_cast<std::size_t>(rank)] = one;
  return done;
}

std::string missing_here(const std::string &where, int ranks) {
  std::lock_guard guard(lock);
  std::string found;
  for (int rank = 0; rank < ranks; ++rank)
    if (!gatherings[where].came.count(rank)) found += (found.empty() ? "" : ", ") + std::to_string(rank);
  return found;
}

void leave(const std::string &where) {
  std::lock_guard guard(lock);
  const auto at = gatherings.find(where);
  if (at != gatherings.end() && ++at->second.left >= at->second.came.size()) gatherings.erase(at);
}

bool transfer(int fd, void *data, std::size_t size, bool out) {
  auto *at = static_cast<std::uint8_t *>(data);
  while (size) {
    const ssize_t n = out ? ::send(fd, at, size, MSG_NOSIGNAL) : ::recv(fd, at, size, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    size -= static_cast<std::size_t>(n);
  }
  return true;
}

int connect_to_agent() {
  const char *path = std::getenv("RGPU_AGENT");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (!path || !*path || std::strlen(path) >= sizeof address.sun_path) return -1;
  std::strcpy(address.sun_path, path);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const timeval seconds{kAgentSeconds, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &seconds, sizeof seconds);
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &seconds, sizeof seconds);
  if (!::connect(fd, reinterpret_cast<sockaddr *>(&address), sizeof address)) return fd;
  ::close(fd);
  return -1;
}

bool ask_agent(const std::string &where, int ranks, int rank, std::uint64_t payload, std::uint32_t &type,
               std::vector<std::uint8_t> &body) {
  const int fd = connect_to_agent();
  if (fd < 0) return false;
  wire::MessageHead head{static_cast<std::uint32_t>(sizeof(wire::GatherHead) + where.size()), wire::kGather};
  wire::GatherHead about{wire::kProtocol, static_cast<std::uint32_t>(ranks), static_cast<std::uint32_t>(rank), payload};
  std::string name = where;
  bool done = transfer(fd, &head, sizeof head, true) && transfer(fd, &about, sizeof about, true) &&
              transfer(fd, name.data(), name.size(), true) && transfer(fd, &head, sizeof head, false) &&
              head.length <= kMaxBody;
  if (done) {
    type = head.type;
    body.resize(head.length);
    done = transfer(fd, body.data(), body.size(), false);
  }
  ::close(fd);
  return done;
}

// Parses GATHERED; false where it cannot be read.
bool read(const std::vector<std::uint8_t> &body, std::vector<Came> &came) {
  std::size_t at = 0;
  for (Came &one : came) {
    std::uint16_t length;
    if (body.size() - at < sizeof one.payload + sizeof length) return false;
    std::memcpy(&one.payload, body.data() + at, sizeof one.payload);
    std::memcpy(&length, body.data() + at + sizeof one.payload, sizeof length);
    at += sizeof one.payload + sizeof length;
    if (body.size() - at < length) return false;
    one.session.assign(reinterpret_cast<const char *>(body.data()) + at, length);
    at += length;
  }
  return at == body.size();
}

// Sends one request. ncclInProgress: some ranks have not arrived, or the agent did not answer; `why` is the reason.
ncclResult_t ask(const std::string &where, int ranks, int rank, std::uint64_t payload, std::vector<Came> &came,
                 std::string &why) {
  std::uint32_t type = 0;
  std::vector<std::uint8_t> body;
  if (!ask_agent(where, ranks, rank, payload, type, body)) {
    why = "the agent of this process does not answer";
    return ncclInProgress;
  }
  if (type == wire::kGathered && read(body, came)) {
    why.clear();
    for (int other = 0; other < ranks; ++other)
      if (came[static_cast<std::size_t>(other)].session.empty())
        why += (why.empty() ? "these ranks had not come: " : ", ") + std::to_string(other);
    return why.empty() ? ncclSuccess : ncclInProgress;
  }
  std::int32_t result = 0;
  if (type != wire::kRefused || body.size() < sizeof result + 2) {
    why = "the agent's answer cannot be read";
    return ncclInternalError;
  }
  std::memcpy(&result, body.data(), sizeof result);
  why.assign(reinterpret_cast<const char *>(body.data()) + sizeof result + 2, body.size() - sizeof result - 2);
  return result == kNotReady ? ncclInProgress : ncclInvalidUsage;
}

ncclResult_t say(ncclResult_t result, const std::string &text) {
  table()->complain(text.c_str(), text.c_str());
  return fail(result, "%s", text.c_str());
}

ncclResult_t wait(const char *what, const std::string &where, int ranks, int rank, std::uint64_t payload,
                  bool only_here, std::vector<Came> &came) {
  const auto until = Clock::now() + patience();
  const std::string late = std::string(what) + ": after " + std::to_string(patience().count()) + " s ";
  if (all_here(where, ranks, only_here ? until : std::min(until, Clock::now() + kHere), came)) return ncclSuccess;
  if (only_here) return say(ncclSystemError, late + "these ranks had not come: " + missing_here(where, ranks));
  auto again = std::chrono::duration_cast<std::chrono::milliseconds>(kFirstAgain);
  while (true) {
    std::string why;
    const ncclResult_t result = ask(where, ranks, rank, payload, came, why);
    if (result == ncclSuccess) return result;
    if (result != ncclInProgress) return say(result, std::string(what) + ": " + why);
    if (Clock::now() >= until) return say(ncclSystemError, late + why);
    for (Came &one : came) one = Came{};
    if (all_here(where, ranks, std::min(until, Clock::now() + again), came)) return ncclSuccess;
    again = std::min(again * 3 / 2, std::chrono::duration_cast<std::chrono::milliseconds>(kLastAgain));
  }
}

}  // namespace

bool come(const std::string &where, int rank, std::uint64_t payload, const std::string &session) {
  std::lock_guard guard(lock);
  const bool first = gatherings[where].came.emplace(rank, Came{payload, session}).second;
  changed.notify_all();
  return first;
}

ncclResult_t gather(const char *what, const std::string &where, int ranks, int rank, std::uint64_t payload,
                    bool only_here, std::vector<Came> &came) {
  came.assign(static_cast<std::size_t>(ranks), Came{});
  const ncclResult_t result = wait(what, where, ranks, rank, payload, only_here, came);
  leave(where);
  return result;
}

std::string members_of(const std::vector<Came> &came) {
  const bool one = std::all_of(came.begin(), came.end(),
                               [&](const Came &other) { return other.session == came.front().session; });
  std::string found;
  for (const Came &other : came) {
    const auto length = static_cast<std::uint16_t>(other.session.size());
    if (!one) found.append(reinterpret_cast<const char *>(&length), sizeof length).append(other.session);
  }
  return found;
}

}  // namespace rgpu::nccl
