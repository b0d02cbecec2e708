// Relays TCP connections and adds a fixed delay each way, without reordering and without a limit of bandwidth:
// one thread reads pieces and stamps each with the time it is due, another sends each when its time has come.
//
//   delay_proxy TARGET_PORT ONE_WAY_MICROSECONDS      prints "port N", relays 127.0.0.1:N to 127.0.0.1:TARGET_PORT
//
// It ends with its standard input, so that none is left behind.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t PIECE = 1 << 20;            // the largest read
constexpr std::size_t HELD = std::size_t{4} << 30;  // bytes under way in one direction: 10 ms of 400 GB/s

std::int64_t now_ns() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

void sleep_until(std::int64_t due) {
  timespec t{due / 1'000'000'000ll, due % 1'000'000'000ll};
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {
  }
}

/// A buffer with ``size`` bytes in it; buffers are used again, since fresh memory costs more than the copy.
struct Piece {
  std::int64_t due = 0;
  std::size_t size = 0;
  std::unique_ptr<char[]> data;
};

/// One direction of a connection.
struct Lane {
  int from, to;
  std::int64_t delay_ns;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Piece> pieces;
  std::vector<std::unique_ptr<char[]>> spare;
  std::size_t held = 0;
  bool ended = false;

  std::unique_ptr<char[]> buffer() {
    std::lock_guard guard(lock);
    if (spare.empty()) return std::make_unique_for_overwrite<char[]>(PIECE);
    auto found = std::move(spare.back());
    spare.pop_back();
    return found;
  }

  void read() {
    while (true) {
      Piece piece{0, 0, buffer()};
      ssize_t n = ::recv(from, piece.data.get(), PIECE, 0);
      if (n < 0 && errno == EINTR) continue;
      std::unique_lock guard(lock);
      if (n <= 0) {
        ended = true;
        changed.notify_all();
        return;
      }
      piece.due = now_ns() + delay_ns;
      piece.size = static_cast<std::size_t>(n);
      changed.wait(guard, [&] { return held < HELD || ended; });
      if (ended) return;
      held += piece.size;
      pieces.push_back(std::move(piece));
      changed.notify_all();
    }
  }

  void write() {
    ::prctl(PR_SET_TIMERSLACK, 1);  // nanosecond; otherwise a sleep ends some 50 us late
    while (true) {
      Piece piece;
      {
        std::unique_lock guard(lock);
        changed.wait(guard, [&] { return !pieces.empty() || ended; });
        if (pieces.empty()) break;
        piece = std::move(pieces.front());
        pieces.pop_front();
      }
      if (delay_ns) sleep_until(piece.due);
      if (!send_all(piece)) break;
      std::lock_guard guard(lock);
      held -= piece.size;
      if (spare.size() < 256) spare.push_back(std::move(piece.data));
      changed.notify_all();
    }
    ::shutdown(to, SHUT_WR);
    ::shutdown(from, SHUT_RD);
    std::lock_guard guard(lock);
    ended = true;
    changed.notify_all();
  }

  bool send_all(const Piece& piece) const {
    for (std::size_t at = 0; at < piece.size;) {
      ssize_t n = ::send(to, piece.data.get() + at, piece.size - at, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      at += static_cast<std::size_t>(n);
    }
    return true;
  }
};

void relay(int near, int far, std::int64_t delay_ns) {
  int on = 1;
  for (int fd : {near, far}) ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  Lane there{near, far, delay_ns, {}, {}, {}, {}}, back{far, near, delay_ns, {}, {}, {}, {}};
  std::thread threads[] = {std::thread([&] { there.read(); }), std::thread([&] { there.write(); }),
                           std::thread([&] { back.read(); }), std::thread([&] { back.write(); })};
  for (auto& thread : threads) thread.join();
  ::close(near);
  ::close(far);
}

sockaddr_in local(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  address.sin_port = ::htons(static_cast<std::uint16_t>(port));
  return address;
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) {
    std::fprintf(stderr, "usage: delay_proxy TARGET_PORT ONE_WAY_MICROSECONDS\n");
    return 2;
  }
  ::signal(SIGPIPE, SIG_IGN);
  const int target = std::atoi(words[1]);
  const auto delay_ns = static_cast<std::int64_t>(std::atof(words[2]) * 1000);
  int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = local(0);
  socklen_t size = sizeof address;
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), size) || ::listen(listener, 64) ||
      ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size)) {
    std::perror("delay_proxy");
    return 1;
  }
  std::printf("port %d\n", ::ntohs(address.sin_port));
  std::fflush(stdout);
  std::thread([] {
    char byte;
    while (::read(STDIN_FILENO, &byte, 1) > 0) {
    }
    std::_Exit(0);
  }).detach();
  while (true) {
    int near = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (near < 0) continue;
    int far = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in there = local(target);
    if (::connect(far, reinterpret_cast<sockaddr*>(&there), sizeof there)) {
      ::close(near);
      ::close(far);
      continue;
    }
    std::thread(relay, near, far, delay_ns).detach();
  }
}
