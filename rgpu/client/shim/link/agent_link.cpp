// The Unix socket to the agent: HELLO and WELCOME, the reader thread, rare messages
// (docs/developers/links/shim-link.md, "Unix socket, shim ↔ agent").
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::size_t MAX_CONTROL_BODY = 16u << 20;  // of any message but ANSWER
constexpr std::size_t MAX_REPLY = 1u << 30;          // reply arguments: a linked module binary is the longest

bool read_all(int fd, void* to, std::size_t size) {
  auto* at = static_cast<std::uint8_t*>(to);
  while (size) {
    const ssize_t n = ::recv(fd, at, size, 0);
    if (n > 0) {
      at += n;
      size -= static_cast<std::size_t>(n);
    } else if (n == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool skip(int fd, std::uint64_t size) {
  std::uint8_t scratch[16384];
  while (size) {
    const std::size_t part = std::min<std::uint64_t>(size, sizeof scratch);
    if (!read_all(fd, scratch, part)) return false;
    size -= part;
  }
  return true;
}

template <class T>
bool take(const std::uint8_t*& at, const std::uint8_t* end, T& value) {
  return wire::detail::get(at, end, value);
}

bool take_text(const std::uint8_t*& at, const std::uint8_t* end, std::string& text) {
  std::uint16_t length = 0;
  if (!take(at, end, length) || static_cast<std::size_t>(end - at) < length) return false;
  text.assign(reinterpret_cast<const char*>(at), length);
  at += length;
  return true;
}

// Field 22 of /proc/self/stat; the name may contain any character, so fields are counted from the last ')'.
std::uint64_t start_time() {
  char text[1024];
  const int fd = ::open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  const ssize_t n = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  const char* at = std::strrchr(text, ')');
  for (int field = 2; at && field < 22; ++field) at = std::strchr(at + 1, ' ');
  return at ? std::strtoull(at + 1, nullptr, 10) : 0;
}

std::vector<std::uint8_t> hello_body(bool ring) {
  char name[4096];
  const ssize_t n = ::readlink("/proc/self/exe", name, sizeof name);
  const std::uint16_t length = n > 0 ? static_cast<std::uint16_t>(n) : 0;
  wire::HelloHead head{};
  head.protocol = wire::kProtocol;
  head.pid = static_cast<std::uint32_t>(::getpid());
  head.ppid = static_cast<std::uint32_t>(::getppid());
  head.wants = (ring ? wire::kWantsRing | wire::kWantsArea : std::uint32_t{0}) | wire::kWantsText;
  head.starttime = start_time();
  std::vector<std::uint8_t> body(sizeof head + sizeof length + length);
  std::uint8_t* at = body.data();
  wire::detail::put(at, head);
  wire::detail::put(at, length);
  if (length) std::memcpy(at, name, length);
  return body;
}

// Reads a message's head, and the descriptor that may be attached to its first byte.
bool read_head(int socket, wire::MessageHead& found, int& fd) {
  std::uint8_t head[sizeof found];
  iovec io{head, sizeof head};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t n;
  do n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  if (n <= 0) return false;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len >= CMSG_LEN(sizeof(int)))
      std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
  if (!read_all(socket, head + n, sizeof head - static_cast<std::size_t>(n))) return false;
  std::memcpy(&found, head, sizeof head);
  return true;
}

// Reads the first message from the agent, with its descriptor.
bool receive_first(int socket, std::uint32_t& type, std::vector<std::uint8_t>& body, int& fd) {
  wire::MessageHead head;
  if (!read_head(socket, head, fd) || head.length > MAX_CONTROL_BODY) return false;
  type = head.type;
  body.resize(head.length);
  return read_all(socket, body.data(), body.size());
}

// ---------------------------------------------------------------- the reader

bool read_answer(Session& s, std::uint32_t length) {
  wire::AnswerHead head;
  if (length < sizeof head || !read_all(s.socket, &head, sizeof head)) return false;
  std::uint64_t rest = length - sizeof head;
  if (head.reply > rest || head.reply > MAX_REPLY) return false;
  rest -= head.reply;
  if (head.flags & wire::kAnswerSticky) set_sticky(static_cast<CUresult>(head.result));
  Waiter* waiter = take_waiter(s, head.seq);
  if (!waiter) {
    log_line("an answer to call %llu, which nobody awaits", static_cast<unsigned long long>(head.seq));
    return skip(s.socket, head.reply + rest);
  }
  Answer& answer = *waiter->answer;
  answer.result = static_cast<CUresult>(head.result);
  answer.sticky = head.flags & wire::kAnswerSticky;
  answer.seq = head.seq;
  answer.payload_size = rest;
  answer.reply.resize(head.reply);
  bool whole = read_all(s.socket, answer.reply.data(), head.reply);
  if (whole && rest && rest <= waiter->capacity) {
    whole = read_all(s.socket, waiter->destination, rest);  // straight into the program's memory
  } else if (whole && rest) {
    log_once("long answer", "an answer has %llu bytes where %llu were expected", static_cast<unsigned long long>(rest),
             static_cast<unsigned long long>(waiter->capacity));
    if (!answer.result) answer.result = CUDA_ERROR_UNKNOWN;
    whole = skip(s.socket, rest);
  }
  if (!whole) answer.result = CUDA_ERROR_SYSTEM_NOT_READY;
  finish_waiter(waiter);
  return whole;
}

// Maps the worker's memory for long answers: it is used once the agent has received AREA_MAPPED.
void take_area(Session& s, const std::vector<std::uint8_t>& body, int fd) {
  wire::AreaOffer offer;
  if (body.size() != sizeof offer) return;
  std::memcpy(&offer, body.data(), sizeof offer);
  if (fd >= 0 && !offer.zero && map_area(s.ring, fd, offer.number, offer.size))
    send_message(s, wire::kAreaMapped, &offer.number, sizeof offer.number);
  else
    log_once("area", "shared memory for answers cannot be used: they come by way of the agent");
}

void on_message(Session& s, std::uint32_t type, const std::vector<std::uint8_t>& body, int fd) {
  const std::uint8_t *at = body.data(), *end = at + body.size();
  std::uint32_t number = 0;
  std::string reason;
  switch (type) {
    case wire::kWatermark:
      take_watermark(at, end);
      break;
    case wire::kText:
      if (!take_device_text(at, end)) log_once("device text", "what the agent sent as printed text cannot be");
      break;
    case wire::kRelease:
      if (take(at, end, number)) release_segment(s, number);
      break;
    case wire::kArea:
      take_area(s, body, fd);
      break;
    case wire::kState:
      if (!take(at, end, number) || !take_text(at, end, reason)) break;
      if (number == wire::kJournalFull)
        log_once("full " + reason, "calls wait, the journal is full: %s", reason.c_str());
      else if (number == wire::kUnprotected)
        log_once("unprotected " + reason, "the session is not protected any more: %s", reason.c_str());
      break;
    default:
      log_line("a message of type %u from the agent is not understood", type);
  }
}

// Waits for the socket; reads the ring when the doorbell rings. False: the session is over.
bool wait_socket(Session& s) {
  pollfd ready[2] = {{s.socket, POLLIN, 0}, {s.ring.doorbell, POLLIN, 0}};  // a negative descriptor is ignored
  for (;;) {
    if (::poll(ready, 2, -1) < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    if (ready[1].revents) {
      std::uint64_t count;
      [[maybe_unused]] ssize_t ignored = ::read(s.ring.doorbell, &count, sizeof count);
      if (!read_ring(s)) {
        log_once("answer ring", "what the agent wrote into the answer ring cannot be");
        return false;
      }
    }
    if (ready[0].revents) return true;
  }
}

void* reader(void* argument) {
  Session& s = *static_cast<Session*>(argument);
  ::pthread_setname_np(::pthread_self(), "rgpu-reader");
  std::vector<std::uint8_t> body;
  for (;;) {
    wire::MessageHead head;
    int fd = -1;
    bool whole = wait_socket(s) && read_head(s.socket, head, fd);
    if (whole && head.type == wire::kAnswer) {
      whole = read_answer(s, head.length);
    } else if (whole && (whole = head.length <= MAX_CONTROL_BODY)) {
      body.resize(head.length);
      whole = read_all(s.socket, body.data(), body.size());
      if (whole) on_message(s, head.type, body, fd);
    }
    if (fd >= 0) ::close(fd);
    if (!whole) break;
  }
  lose_agent(s);
  return nullptr;
}

bool start_reader(Session& s) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);  // signals of the program are handled by its own threads
  pthread_t thread;
  const int failed = ::pthread_create(&thread, nullptr, reader, &s);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!failed) ::pthread_detach(thread);
  return !failed;
}

CUresult fail(Session& s, int extra, CUresult result) {
  if (extra >= 0) ::close(extra);
  if (s.socket >= 0) ::close(s.socket);
  if (s.wake >= 0) ::close(s.wake);
  s.socket = s.wake = -1;
  drop_ring(s.ring);
  return result;
}

CUresult map_agent_page(Session& s, int fd) {
  void* page = fd < 0 ? MAP_FAILED : ::mmap(nullptr, wire::kAgentPageSize, PROT_READ, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED || std::memcmp(page, wire::kAgentPageMagic, 8)) {
    log_once("agent page", "the agent's page cannot be used");
    return CUDA_ERROR_SYSTEM_NOT_READY;
  }
  ::madvise(page, wire::kAgentPageSize, MADV_DONTFORK);
  wire::AgentPageHeader header;
  std::memcpy(&header, page, sizeof header);
  if (!map_ring(s.ring, fd, header.ring_offset, header.ring_size)) {
    log_once("agent page", "the agent's answer ring cannot be used");
    return CUDA_ERROR_SYSTEM_NOT_READY;
  }
  s.sleeping = reinterpret_cast<const volatile std::uint32_t*>(static_cast<std::uint8_t*>(page) + wire::kAgentSleepingOffset);
  return CUDA_SUCCESS;
}

}  // namespace

void take_watermark(const std::uint8_t* at, const std::uint8_t* end) {
  wire::WatermarkHead head;
  if (!take(at, end, head) || head.count > static_cast<std::size_t>(end - at) / sizeof(wire::StreamMark)) return;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> streams(head.count);
  for (auto& [stream, seq] : streams) {
    wire::StreamMark mark;
    take(at, end, mark);
    stream = mark.stream;
    seq = mark.seq;
  }
  if (head.error) set_sticky(static_cast<CUresult>(head.error));
  watermark(head.done, streams);
}

bool parse_facts(const std::uint8_t* at, std::size_t size, Facts& facts) {
  const std::uint8_t* end = at + size;
  wire::FactsHead head;
  if (!take(at, end, head) || head.version != wire::kFactsVersion || head.devices > 64 || !take_text(at, end, facts.name))
    return false;
  facts.driver_version = head.driver_version;
  facts.session_number = head.session_number;
  facts.quota = head.quota;
  facts.journal_limit = head.journal_limit;
  facts.recover = head.recover != 0;
  facts.devices.resize(head.devices);
  for (auto& device : facts.devices) {
    wire::FactsDevice told;
    std::uint32_t count = 0;
    if (!take(at, end, told) || !take_text(at, end, device.name) || !take(at, end, count) ||
        count > static_cast<std::size_t>(end - at) / sizeof(wire::FactsAttribute))
      return false;
    static_assert(sizeof device.uuid == sizeof told.uuid);
    std::memcpy(device.uuid, told.uuid, sizeof device.uuid);
    device.pci_domain = told.pci_domain;
    device.pci_bus = told.pci_bus;
    device.pci_device = told.pci_device;
    device.total_memory = told.total_memory;
    device.range_base = told.range_base;
    device.range_size = told.range_size;
    device.attributes.resize(count);
    for (auto& [which, value] : device.attributes) {
      wire::FactsAttribute one;
      take(at, end, one);
      which = one.attribute;
      value = one.value;
    }
    std::sort(device.attributes.begin(), device.attributes.end());
  }
  return at == end;
}

namespace {

// Makes s.socket a connection to the agent.
CUresult dial(Session& s) {
  const char* path = std::getenv("RGPU_AGENT");
  if (!path || !*path) {
    log_once("no agent", "RGPU_AGENT is not set: start the program with `rgpu run`");
    return CUDA_ERROR_NO_DEVICE;
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (std::strlen(path) >= sizeof address.sun_path) return CUDA_ERROR_SYSTEM_NOT_READY;
  std::strcpy(address.sun_path, path);
  s.socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (s.socket < 0 || ::connect(s.socket, reinterpret_cast<sockaddr*>(&address), sizeof address)) {
    log_once("agent gone", "the agent at %s cannot be reached: %s", path, std::strerror(errno));
    return fail(s, -1, CUDA_ERROR_SYSTEM_NOT_READY);
  }
  return CUDA_SUCCESS;
}

// Returns the result of a refusal, which the agent has reported to the user.
CUresult refused(const std::vector<std::uint8_t>& body) {
  const std::uint8_t* at = body.data();
  std::int32_t result = 0;
  std::string reason;
  take(at, body.data() + body.size(), result);
  take_text(at, body.data() + body.size(), reason);
  log_line("the session was refused: %s", reason.c_str());
  return result ? static_cast<CUresult>(result) : CUDA_ERROR_SYSTEM_NOT_READY;
}

}  // namespace

CUresult fetch_list(Session& s) {
  if (CUresult r = dial(s); r) return r;
  const std::uint32_t protocol = wire::kProtocol;
  std::uint32_t type = 0;
  std::vector<std::uint8_t> body;
  int none = -1;
  if (!send_message(s, wire::kList, &protocol, sizeof protocol) || !receive_first(s.socket, type, body, none)) {
    s.gone = false;  // the session uses another connection
    return fail(s, none, CUDA_ERROR_SYSTEM_NOT_READY);
  }
  if (type == wire::kRefused) return fail(s, none, refused(body));
  Facts told;
  const bool understood = type == wire::kListed && parse_facts(body.data(), body.size(), told);
  fail(s, none, CUDA_SUCCESS);  // closes the connection
  if (!understood) {
    log_once("list", "the agent's list of devices is not understood: do agent and library have the same version?");
    return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
  }
  s.listed = std::move(told.devices);
  told.devices.clear();
  s.list = std::move(told);
  s.listing = true;
  return CUDA_SUCCESS;
}

CUresult connect_agent(Session& s) {
  if (CUresult r = dial(s); r) return r;
  s.wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (s.wake < 0) return fail(s, -1, CUDA_ERROR_SYSTEM_NOT_READY);
  int ring_page = -1;
  const bool ring = prepare_ring(s.ring, ring_page);
  const auto hello = hello_body(ring);
  std::vector<int> given{s.wake};
  if (ring) given.insert(given.end(), {ring_page, s.ring.doorbell});
  std::uint32_t type = 0;
  std::vector<std::uint8_t> body;
  int page = -1;
  const auto device = static_cast<std::uint32_t>(s.chosen);
  const bool sent = (!s.listing || send_message(s, wire::kChoose, &device, sizeof device)) &&
                    send_message(s, wire::kHello, hello.data(), hello.size(), given);
  if (ring) ::close(ring_page);
  if (!sent || !receive_first(s.socket, type, body, page)) return fail(s, page, CUDA_ERROR_SYSTEM_NOT_READY);
  if (type == wire::kRefused) return fail(s, page, refused(body));
  if (type != wire::kWelcome || !parse_facts(body.data(), body.size(), s.facts)) {
    log_once("welcome", "the agent's welcome is not understood: do agent and library have the same version?");
    return fail(s, page, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
  }
  if (CUresult r = map_agent_page(s, page)) return fail(s, page, r);
  ::close(page);
  if (!start_reader(s)) return fail(s, -1, CUDA_ERROR_OPERATING_SYSTEM);
  start_preallocator(s);
  return CUDA_SUCCESS;
}

bool send_message(Session& s, std::uint32_t type, const void* body, std::size_t size, int fd) {
  return send_message(s, type, body, size, fd >= 0 ? std::vector<int>{fd} : std::vector<int>{});
}

bool send_message(Session& s, std::uint32_t type, const void* body, std::size_t size, const std::vector<int>& fds) {
  const wire::MessageHead head{static_cast<std::uint32_t>(size), type};
  std::vector<std::uint8_t> bytes(sizeof head + size);
  std::memcpy(bytes.data(), &head, sizeof head);
  if (size) std::memcpy(bytes.data() + sizeof head, body, size);
  iovec io{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  if (const std::size_t bytes_of_fds = fds.size() * sizeof(int); bytes_of_fds) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(bytes_of_fds);
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(bytes_of_fds);
    std::memcpy(CMSG_DATA(c), fds.data(), bytes_of_fds);
  }
  std::lock_guard guard(s.send_lock);
  while (io.iov_len) {
    const ssize_t n = ::sendmsg(s.socket, &message, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      ::shutdown(s.socket, SHUT_RDWR);  // the reader thread sees the end and wakes all waiters
      s.gone = true;
      return false;
    }
    io.iov_base = static_cast<std::uint8_t*>(io.iov_base) + n;
    io.iov_len -= static_cast<std::size_t>(n);
    message.msg_control = nullptr;  // the descriptors were sent with the first byte
    message.msg_controllen = 0;
  }
  return true;
}

void wake_agent(Session& s) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!s.sleeping || !*s.sleeping) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] ssize_t ignored = ::write(s.wake, &one, sizeof one);
}

void lose_agent(Session& s) {
  read_ring(s);  // answers that the agent wrote before it ended
  if (!s.gone.exchange(true)) log_line("the agent is gone");
  {
    std::lock_guard reading(s.ring.reading);  // no thread may be writing into a waiter's memory when it returns
    s.ring.broken = true;
    finish_copies(s.ring);
    fail_waiters(s, CUDA_ERROR_SYSTEM_NOT_READY);
  }
  std::lock_guard guard(s.segments_lock);
  s.released.notify_all();
  s.preallocated_low.notify_all();
}

void flush() { wake_agent(session()); }

}  // namespace rgpu
