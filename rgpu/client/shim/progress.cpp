// What is known to be complete: the worker's watermark, and what awaited
// answers taught. Streams are compared by the last ordered call given to them.
#include <algorithm>
#include <unordered_map>

#include "session.hpp"

namespace rgpu {
namespace {

struct Mark {
  int device = 0;           // the session's number
  std::uint64_t given = 0;  // last ordered call published on the stream
  std::uint64_t done = 0;   // the stream is complete up to this call
};

struct Progress {
  std::mutex lock;
  std::uint64_t all_done = 0;  // every call <= this is complete
  std::unordered_map<std::uint64_t, Mark> streams;
};

Progress& progress() {
  static auto* p = new Progress;
  return *p;
}

bool covers(const Progress& p, std::uint64_t stream, std::uint64_t seq) {
  if (seq <= p.all_done) return true;
  auto it = p.streams.find(stream);
  return it != p.streams.end() && seq <= it->second.done;
}

}  // namespace

void watermark(std::uint64_t all_done, const std::vector<std::pair<std::uint64_t, std::uint64_t>>& streams) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  p.all_done = std::max(p.all_done, std::min(all_done, published()));
  for (auto [stream, seq] : streams) {
    auto it = p.streams.find(stream);
    if (it != p.streams.end()) it->second.done = std::max(it->second.done, seq);
  }
  // A stream whose work is all done needs no entry: a destroyed one goes this way.
  std::erase_if(p.streams, [&](auto& entry) { return entry.second.given <= p.all_done; });
}

void given(std::uint64_t stream, std::uint64_t seq, int device) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  Mark& mark = p.streams[stream];
  mark.device = device;
  mark.given = std::max(mark.given, seq);
}

void learned(std::uint64_t stream, std::uint64_t seq) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  auto it = p.streams.find(stream);
  if (it != p.streams.end()) it->second.done = std::max(it->second.done, seq);
}

void learned_on(int device, std::uint64_t seq) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  if (facts().devices.size() == 1) {
    p.all_done = std::max(p.all_done, seq);
    return;
  }
  for (auto& [stream, mark] : p.streams)
    if (mark.device == device) mark.done = std::max(mark.done, seq);
}

std::uint64_t last_given(std::uint64_t stream) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  auto it = p.streams.find(stream);
  return it == p.streams.end() ? 0 : it->second.given;
}

bool all_complete(std::uint64_t up_to) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  return up_to <= p.all_done;
}

bool complete_on(std::uint64_t stream, std::uint64_t seq) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  return covers(p, stream, seq);
}

bool idle() { return idle_on(kEveryDevice); }

bool idle_on(int device) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  for (auto& [stream, mark] : p.streams)
    if ((device == kEveryDevice || mark.device == device) && mark.given > p.all_done && mark.given > mark.done)
      return false;
  return true;
}

bool complete_on_device(int device, std::uint64_t seq) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  if (seq <= p.all_done) return true;
  for (auto& [stream, mark] : p.streams)
    if ((device == kEveryDevice || mark.device == device) && mark.given > p.all_done && mark.given > mark.done &&
        mark.done < seq)
      return false;
  return true;
}

}  // namespace rgpu
