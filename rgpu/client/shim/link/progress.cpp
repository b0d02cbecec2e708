// Work known to be complete: from the worker's watermark and from awaited answers. Streams are compared by the last
// ordered call given to them. Before the program, or a published call, relies on a completion known here,
// completed(seq) must be published (SEMANTICS 1).
#include <algorithm>
#include <unordered_map>

#include "session.hpp"

namespace rgpu {
namespace {

struct Mark {
  int device = 0;           // the session's number
  bool blocking = true;     // orders with its device's legacy stream
  std::uint64_t given = 0;  // last ordered call published on the stream
  std::uint64_t done = 0;   // the stream is complete up to this call
};

// The completion of work implies that of other streams' work before it, even if the watermark reports that later.
struct Behind {
  std::uint64_t stream, seq;   // once the stream is complete up to this call …
  std::uint64_t other, up_to;  // … `other` is complete up to this one
};

struct Progress {
  std::mutex lock;
  std::uint64_t all_done = 0;  // every call <= this is complete
  std::unordered_map<std::uint64_t, Mark> streams;
  std::vector<Behind> behind;  // kept only while host_memory_in_use()
};

bool is_legacy(std::uint64_t stream) { return stream < wire::kFirstHandle; }

Progress& progress() {
  static auto* p = new Progress;
  return *p;
}

bool covers(const Progress& p, std::uint64_t stream, std::uint64_t seq) {
  if (seq <= p.all_done) return true;
  auto it = p.streams.find(stream);
  return it != p.streams.end() && seq <= it->second.done;
}

// Applies implications until none is left. Lock held, after a stream's `done` has grown.
void follow(Progress& p) {
  for (bool news = !p.behind.empty(); news;) {
    news = false;
    std::erase_if(p.behind, [&](const Behind& b) {
      if (covers(p, b.other, b.up_to)) return true;
      if (!covers(p, b.stream, b.seq)) return false;
      if (auto it = p.streams.find(b.other); it != p.streams.end()) it->second.done = std::max(it->second.done, b.up_to);
      return news = true;
    });
  }
}

void add_behind(Progress& p, const Behind& b) {
  if (!b.up_to || b.other == b.stream || covers(p, b.other, b.up_to)) return;
  const bool known = std::any_of(p.behind.begin(), p.behind.end(), [&](const Behind& old) {
    return old.stream == b.stream && old.other == b.other && old.up_to >= b.up_to && old.seq <= b.seq;
  });
  if (!known) p.behind.push_back(b);
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
  follow(p);
  // A stream whose work is all complete needs no entry: this removes destroyed streams. The few legacy streams are
  // kept, because last_given() is called for them long after their last call is complete.
  std::erase_if(p.streams, [&](auto& entry) { return entry.second.given <= p.all_done && !is_legacy(entry.first); });
}

void given(std::uint64_t stream, std::uint64_t seq, int device, bool blocking) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  Mark& mark = p.streams[stream];
  mark.device = device;
  mark.blocking = blocking;
  mark.given = std::max(mark.given, seq);
  if (!blocking || !host_memory_in_use()) return;
  // Work of the legacy stream begins after that of the blocking streams, and theirs after its.
  for (auto& [other, its] : p.streams)
    if (its.device == device && its.blocking && (is_legacy(stream) || is_legacy(other)))
      add_behind(p, {stream, seq, other, std::min(its.given, seq - 1)});
}

void waits_for(std::uint64_t stream, std::uint64_t seq, std::uint64_t other, std::uint64_t up_to) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  add_behind(p, {stream, seq, other, up_to});
}

void learned(std::uint64_t stream, std::uint64_t seq) {
  Progress& p = progress();
  std::lock_guard guard(p.lock);
  auto it = p.streams.find(stream);
  if (it != p.streams.end()) it->second.done = std::max(it->second.done, seq);
  follow(p);
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
