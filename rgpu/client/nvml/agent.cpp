// OBSERVE and OBSERVED on the agent's Unix socket (docs/architecture.md,
// "Observing"). One connection for each question: nothing is held between
// them, so a fork or a restarted agent needs no care.
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "state.hpp"

namespace rgpu::nvml {
namespace {

constexpr std::uint32_t PROTOCOL = 1, OBSERVE = 4, REFUSED = 36, OBSERVED = 38;
constexpr std::uint32_t MAX_BODY = 1u << 20;
constexpr std::int32_t NO_DEVICE = 100;  // CUresult: the pool has no place
constexpr int PATIENCE = 10;             // seconds: the agent may have to ask the pool

// Reads fields of a body; after the first that is not there, `ok` is false and all are zero.
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
  if (in.has(sizeof device.uuid)) std::memcpy(device.uuid, in.at, sizeof device.uuid), in.at += sizeof device.uuid;
  device.pci_domain = in.take<std::int32_t>();
  device.pci_bus = in.take<std::int32_t>();
  device.pci_device = in.take<std::int32_t>();
  in.take<std::uint32_t>();
  const auto total = in.take<std::uint64_t>();
  device.memory = quota && total ? std::min(quota, total) : std::max(quota, total);
  in.take<std::uint64_t>();  // the range of addresses: base, size
  in.take<std::uint64_t>();
  device.name = in.text(in.take<std::uint16_t>());
  const auto count = in.take<std::uint32_t>();
  for (std::uint32_t i = 0; i < count && in.has(8); ++i) {
    const auto which = in.take<std::int32_t>();
    device.attributes.emplace_back(which, in.take<std::int32_t>());
  }
  return device;
}

// Session facts, as WELCOME carries them.
bool read_facts(Reader in, Observation &found) {
  if (in.take<std::uint32_t>() != 1) return false;
  found.driver_version = in.take<std::uint32_t>();
  in.take<std::uint64_t>();  // the session's number
  const auto quota = in.take<std::uint64_t>();
  in.take<std::uint64_t>();  // the journal's limit
  in.take<std::uint32_t>();  // recover
  const auto devices = in.take<std::uint32_t>();
  in.text(in.take<std::uint16_t>());
  for (std::uint32_t i = 0; i < devices && in.ok; ++i) found.devices.push_back(read_device(in, quota));
  return in.ok && in.at == in.end;
}

bool read_observation(const std::vector<std::uint8_t> &body, Observation &found) {
  Reader in{body.data(), body.data() + body.size()};
  const auto version = in.take<std::uint32_t>();
  in.take<std::uint32_t>();  // flags
  const auto facts = in.take<std::uint32_t>(), release = in.take<std::uint32_t>();
  const auto devices = in.take<std::uint32_t>(), processes = in.take<std::uint32_t>();
  if (!in.ok || version != 1 || !in.has(facts)) return false;
  if (!read_facts(Reader{in.at, in.at + facts}, found) || found.devices.size() != devices) return false;
  in.at += facts;
  found.release = in.text(release);
  for (Device &device : found.devices) device.used = in.take<std::uint64_t>();
  for (std::uint32_t i = 0; i < processes && in.has(16); ++i) {
    Process process;
    process.pid = in.take<std::uint32_t>();
    process.device = in.take<std::uint32_t>();
    process.used = in.take<std::uint64_t>();
    found.processes.push_back(process);
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
  const std::uint32_t question[3] = {4, OBSERVE, PROTOCOL};
  if (::send(fd, question, sizeof question, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof question)) return false;
  std::uint32_t head[2];
  if (!read_all(fd, head, sizeof head) || head[0] > MAX_BODY) return false;
  type = head[1];
  body.resize(head[0]);
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
  if (type == OBSERVED) return read_observation(body, found) ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
  std::int32_t result = 0;
  if (type == REFUSED && body.size() >= sizeof result) std::memcpy(&result, body.data(), sizeof result);
  return result == NO_DEVICE ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

}  // namespace rgpu::nvml
