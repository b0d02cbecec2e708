// Tells the time in which the device works for the session from that in which its streams wait for the host: at the
// gates of collectives, whose other ranks are not there yet, or behind a stream that does.
#include <algorithm>
#include <utility>

#include "engine.hpp"

namespace rgpu {

namespace {
constexpr int kChain = 8;  // streams that wait for each other, followed at most
}

void Engine::activate(Stream &stream) {
    if (stream.active) return;
    stream.active = true;
    if (active_.empty()) {
        busy_since_ = now_ns();
        busy_.notify_one();
    }
    active_.push_back(&stream);
    resting_ += stream.resting;
    tally();
}

// Time in which all streams with work wait at gates, or for others that do, does not count as the device's.
void Engine::tally() {
    const bool works = active_.size() > resting_ &&
                       (!resting_ || std::any_of(active_.begin(), active_.end(), [&](Stream *stream) {
                            return !stream->resting && !behind_a_gate(*stream, kChain);
                        }));
    if (works == works_) return;
    works_ = works;
    const uint64_t now = now_ns();
    if (works) active_since_ = now;
    else worked_ns_ += now - active_since_;
}

// For the thread that opens the gates. It does not take mutex_, whose holder may be inside the driver, waiting for a
// stream at a gate.
void Engine::rest(uint64_t number, bool resting) {
    gates_.store(true, std::memory_order_relaxed);
    std::lock_guard lock(rests_mutex_);
    rests_.emplace_back(number, resting);
}

// As rest().
void Engine::returned(uint64_t seq) {
    std::lock_guard lock(rests_mutex_);
    returned_.push_back(seq);
}

// The caller holds mutex_.
void Engine::take_rests() {
    {
        std::lock_guard lock(rests_mutex_);
        if (rests_.empty() && returned_.empty()) return;
        rests_.swap(resting_now_);
        returned_.swap(returned_now_);
    }
    for (const uint64_t seq : std::exchange(returned_now_, {})) {
        functions_.erase(seq);
        for (Stream *active : active_)
            std::erase_if(active->functions, [&](const auto &function) { return function.first == seq; });
    }
    for (const auto &[number, resting] : resting_now_) {
        auto found = streams_.find(number);
        if (found == streams_.end() || found->second->resting == resting) continue;
        found->second->resting = resting;
        if (found->second->active) resting_ += resting ? 1 : -1;
    }
    resting_now_.clear();
    tally();
}

// A wait for an event is about to be given to the stream, in a session with gates: a marker ahead of it tells when the
// stream has come to it.
void Engine::before_wait(Stream &stream) {
    if (!gates_.load(std::memory_order_relaxed)) return;
    std::lock_guard lock(mutex_);
    if (stream.tick != stream.done) mark_stream(stream);
}

// The wait was given.
void Engine::waits(Stream &stream, const Event &event) {
    if (!gates_.load(std::memory_order_relaxed) || event.stream == stream.number || !event.seq) return;
    std::lock_guard lock(mutex_);
    while (!stream.waits.empty() && stream.waits.front().at <= stream.done) stream.waits.pop_front();
    stream.waits.push_back({stream.tick, event.stream, event.identity, event.tick});
}

// The caller holds mutex_: whether the next of the stream's work is a wait for what a stream at a gate, or one behind it, does after that.
bool Engine::behind_a_gate(Stream &stream, int chain) {
    while (!stream.waits.empty() && stream.waits.front().at <= stream.done) stream.waits.pop_front();
    if (stream.waits.empty() || stream.done + 1 < stream.waits.front().at || !chain) return false;
    const Stream::Wait &wait = stream.waits.front();
    const auto found = streams_.find(wait.stream);
    if (found == streams_.end() || found->second->identity != wait.identity) return false;
    Stream &other = *found->second;
    return other.done < wait.tick && (other.resting || behind_a_gate(other, chain - 1));
}

}  // namespace rgpu
