// OBSERVE and OBSERVED on the agent's Unix socket (docs/protocols/shim.md). Each request has a connection of its own
// and no state is kept between requests, so a fork or a restarted agent needs no handling.
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "shim_link.hpp"
#include "state.hpp"

namespace rgpu::nvml {
namespace {

constexpr std::uint32_t MAX_BODY = 1u << 20;
constexpr std::int32_t NO_DEVICE = 100;  // CUresult: the pool has no device to give
constexpr int PATIENCE = 10;             // seconds: the agent may have to query the pool

// Reads fields of a body; after the first missing field `ok` is false and all values are zero.
struct Reader {
  const std::uint8_t *at, *end;
  bool ok = true;

  bool has(std::size_t size) {
    ok = ok && static_cast<std::size_t>(end - at) >= size;
    return ok;
  }
  template <class T>
  T take() {
    T value{};
    if (has(sizeof value)) {
      std::memcpy(&value, at, sizeof value);
      at += sizeof value;
    }
    return value;
  }
  std::string text(std::size_t size) {
    if (!has(size)) return {};
    std::string found(reinterpret_cast<const char *>(at), size);
    at += size;
    return found;
  }
};

Device read_device(Reader &in, std::uint64_t quota) {
  Device device;
  const auto told = in.take<wire::FactsDevice>();
  static_assert(sizeof device.uuid == sizeof told.uuid);
  std::memcpy(device.uuid, told.uuid, sizeof device.uuid);
  device.pci_domain = told.pci_domain;
  device.pci_bus = told.pci_bus;
  device.pci_device = told.pci_device;
  const std::uint64_t total = told.total_memory;
  device.memory = quota && total ? std::min(quota, total) : std::max(quota, total);
  device.name = in.text(in.take<std::uint16_t>());
  const auto count = in.take<std::uint32_t>();
  for (std::uint32_t i = 0; i < count && in.has(sizeof(wire::FactsAttribute)); ++i) {
    const auto one = in.take<wire::FactsAttribute>();
    device.attributes.emplace_back(one.attribute, one.value);
  }
  return device;
}

// Session facts, as WELCOME carries them.
bool read_facts(Reader in, Observation &found) {
  const auto head = in.take<wire::FactsHead>();
  if (head.version != wire::kFactsVersion) return false;
  found.driver_version = head.driver_version;
  in.text(in.take<std::uint16_t>());
  for (std::uint32_t i = 0; i < head.devices && in.ok; ++i) found.devices.push_back(read_device(in, head.quota));
  return in.ok && in.at == in.end;
}

bool read_observation(const std::vector<std::uint8_t> &body, Observation &found) {
  Reader in{body.data(), body.data() + body.size()};
  const auto head = in.take<wire::ObservedHead>();
  if (!in.ok || head.version != wire::kObservedVersion || !in.has(head.facts)) return false;
  if (!read_facts(Reader{in.at, in.at + head.facts}, found) || found.devices.size() != head.devices) return false;
  in.at += head.facts;
  found.release = in.text(head.release);
  for (Device &device : found.devices) device.used = in.take<std::uint64_t>();
  for (std::uint32_t i = 0; i < head.processes && in.has(sizeof(wire::ObservedProcess)); ++i) {
    const auto told = in.take<wire::ObservedProcess>();
    found.processes.push_back(Process{told.pid, told.device, told.used});
  }
  return in.ok && in.at == in.end;
}

bool read_all(int fd, void *to, std::size_t size) {
  auto *at = static_cast<std::uint8_t *>(to);
  while (size) {
    const ssize_t n = ::recv(fd, at, size, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    size -= static_cast<std::size_t>(n);
  }
  return true;
}

int connect_to(const char *path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (std::strlen(path) >= sizeof address.sun_path) return -1;
  std::strcpy(address.sun_path, path);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const timeval patience{PATIENCE, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (!::connect(fd, reinterpret_cast<sockaddr *>(&address), sizeof address)) return fd;
  ::close(fd);
  return -1;
}

bool ask(int fd, std::uint32_t &type, std::vector<std::uint8_t> &body) {
  const struct {
    wire::MessageHead head;
    std::uint32_t protocol;
  } question{{sizeof question.protocol, wire::kObserve}, wire::kProtocol};
  static_assert(sizeof question == sizeof question.head + sizeof question.protocol);
  if (::send(fd, &question, sizeof question, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof question)) return false;
  wire::MessageHead head;
  if (!read_all(fd, &head, sizeof head) || head.length > MAX_BODY) return false;
  type = head.type;
  body.resize(head.length);
  return read_all(fd, body.data(), body.size());
}

}  // namespace

nvmlReturn_t observe(Observation &found) {
  const char *path = std::getenv("RGPU_AGENT");
  const int fd = path && *path ? connect_to(path) : -1;
  if (fd < 0) return NVML_ERROR_DRIVER_NOT_LOADED;
  std::uint32_t type = 0;
  std::vector<std::uint8_t> body;
  const bool answered = ask(fd, type, body);
  ::close(fd);
  if (!answered) return NVML_ERROR_DRIVER_NOT_LOADED;
  if (type == wire::kObserved) return read_observation(body, found) ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
  std::int32_t result = 0;
  if (type == wire::kRefused && body.size() >= sizeof result) std::memcpy(&result, body.data(), sizeof result);
  return result == NO_DEVICE ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

}  // namespace rgpu::nvml
