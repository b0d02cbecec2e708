// A backlog takes effect in the order in which it was issued (SEMANTICS 20): where work is for another stream than the
// work before, the host waits for the earlier work. When that applies: rgpu/server/worker/apply/ordering.py.
//
// Where the program's own events make the stream wait for all of that, the device keeps the order: a wait of the host
// costs a turn of the GPU where sessions share one (tens of ms), and a program that orders its streams well may change
// them several times a step. Streams track their predecessors as vector clocks do: each stream's submissions, by event
// records and waits. Those two are no work themselves, so they wait for nothing. Nor does anything wait for a host
// function that has returned, only for the work before it.
//
// Where all work follows what was issued before it, the program's observations (`completed`) change nothing on the
// device: a replay puts their waits off until a call that is no work (rgpu/server/worker/apply/apply_loop.py). Not
// while a call is under way that was passed beside work behind an open host function: the function may have returned
// because of it.
#include "engine.hpp"

#include <algorithm>

namespace rgpu {

namespace {
constexpr uint32_t kSurplus = 32;  // calls beyond the usual ones; markers alone account for so many of a stream
constexpr uint32_t kLeast = 8;     // the same where each call takes the device so long that few are under way
constexpr size_t kStreams = 64;    // entries of one stream's past, beyond which those without work are dropped
constexpr double kMarked = 100e6;  // ns of work behind which a marker is recorded, so that progress shows
constexpr size_t kOvertaken = 128, kOvertakenLess = 96;  // calls of other streams that one may overtake; see stay_close
constexpr uint64_t kStall = 800'000'000;                 // ns without any completion
}  // namespace

void Engine::order(bool on) {
    if (on) catch_up_.fetch_add(1, std::memory_order_acq_rel);
    work_stream_.store(kNoStream, std::memory_order_release);
    ordered_.store(on, std::memory_order_release);
}

bool Engine::work_of(const RecordView &view, uint64_t &stream) {
    const auto take = [&](auto call) {
        if (!call.read(view.args, view.header.args_len)) return false;
        stream = call.stream;
        return true;
    };
    switch (view.header.call) {
        case wire::Launch::id: return take(wire::Launch{});
        case wire::GraphLaunch::id: return take(wire::GraphLaunch{});
        case wire::Memset::id: return take(wire::Memset{});
        case wire::MemcpyH2d::id: return take(wire::MemcpyH2d{});
        case wire::MemcpyD2h::id: return take(wire::MemcpyD2h{});
        case wire::MemcpyD2d::id: return take(wire::MemcpyD2d{});
        case wire::Memcpy2dH2d::id: return take(wire::Memcpy2dH2d{});
        case wire::Memcpy2dD2h::id: return take(wire::Memcpy2dD2h{});
        case wire::Memcpy2dD2d::id: return take(wire::Memcpy2dD2d{});
        default: return false;  // it waits for work, or submits none: events order work, and are none
    }
}

// A stream's past belongs to one catch-up: before it, waits were not recorded.
Past &Engine::past(Stream &stream) {
    const uint64_t now = catch_up_.load(std::memory_order_acquire);
    if (stream.past_of != now) stream.past.clear();
    stream.past_of = now;
    return stream.past;
}

namespace {
void reaches(Past &past, uint64_t identity, uint64_t tick) {
    for (auto &[stream, known] : past)
        if (stream == identity) {
            known = std::max(known, tick);
            return;
        }
    past.emplace_back(identity, tick);
}
}  // namespace

// Live, only the place of an event's record is tracked (record_event), not its predecessors.
void Engine::remember_past(Event &event, Stream &stream) {
    event.past.clear();
    event.past_of = 0;
    event.functions.clear();
    if (host_functions_.load(std::memory_order_relaxed)) {
        std::lock_guard lock(mutex_);
        for (const auto &[seq, tick] : stream.functions) event.functions.push_back(seq);
    }
    if (!ordered_.load(std::memory_order_acquire)) return;
    event.past = past(stream);
    event.past_of = stream.past_of;
}

void Engine::comes_behind(Stream &stream, const Event &event) {
    if (!event.functions.empty()) {
        std::lock_guard lock(mutex_);
        take_rests();
        for (const uint64_t seq : event.functions)
            if (functions_.count(seq)) stream.functions.emplace_back(seq, stream.tick);
    }
    if (!event.seq || !ordered_.load(std::memory_order_acquire)) return;
    Past &known = past(stream);
    if (known.size() > kStreams) {  // work of an inactive stream is complete and needs no entry
        std::lock_guard lock(mutex_);
        std::erase_if(known, [&](const auto &item) {
            return std::none_of(active_.begin(), active_.end(),
                                [&](const Stream *active) { return active->identity == item.first; });
        });
    }
    reaches(known, event.identity, event.tick);
    if (event.past_of == stream.past_of)
        for (const auto &[identity, tick] : event.past) reaches(known, identity, tick);
}

// The caller holds the mutex.
bool Engine::behind_all(const Stream &stream) {
    return std::all_of(active_.begin(), active_.end(), [&](const Stream *other) {
        const uint64_t function = other->functions.empty() ? 0 : other->functions.back().second;
        return follows(stream, *other, std::max(other->worked, function));
    });
}

// The caller holds the mutex.
bool Engine::follows(const Stream &stream, const Stream &other, uint64_t tick) {
    if (&other == &stream || other.done >= tick) return true;
    return std::any_of(stream.past.begin(), stream.past.end(),
                       [&](const auto &known) { return known.first == other.identity && known.second >= tick; });
}

void Engine::stops(uint64_t number, uint64_t seq) {
    std::lock_guard lock(mutex_);
    Stream *on = stream(number);
    if (!on) return;
    const uint64_t worked = on->worked;
    submit(*on, seq);
    on->worked = worked;
    on->functions.emplace_back(seq, on->tick);
    functions_.insert(seq);
}

bool Engine::beside(uint64_t number) {
    std::lock_guard lock(mutex_);
    take_rests();
    const Stream *to = stream(number);
    return to && std::all_of(active_.begin(), active_.end(), [&](const Stream *other) {
        const uint64_t before = other->functions.empty() ? other->worked : other->functions.front().second - 1;
        return follows(*to, *other, std::min(other->worked, before));
    });
}

void Engine::pass_beside(uint64_t number) {
    {
        std::lock_guard lock(mutex_);
        take_rests();
        const Stream *to = stream(number);
        if (to && std::any_of(active_.begin(), active_.end(),
                              [&](const Stream *other) { return !follows(*to, *other, other->worked); }))
            beside_ = applied() + 1;
    }
    passed_ = {number, applied() + 1};
    work_stream_.store(kNoStream, std::memory_order_release);  // the next call of this stream has its own turn
}

// The caller holds the mutex.
bool Engine::covers_locked() {
    if (!ordered_.load(std::memory_order_acquire)) return false;
    if (beside_ && std::none_of(active_.begin(), active_.end(), [&](const Stream *active) {
            return !active->pending.empty() && active->pending.front().second <= beside_;
        }))
        beside_ = 0;
    return !beside_;
}

bool Engine::covers() {
    std::lock_guard lock(mutex_);
    return covers_locked();
}

bool Engine::put_off(uint64_t seq) {
    if (!ordered_.load(std::memory_order_acquire)) return false;
    std::lock_guard lock(mutex_);
    while (!put_off_.empty() && complete_locked(put_off_.front())) put_off_.pop_front();
    if (!covers_locked() || retained_.count(seq) || complete_locked(seq)) return false;
    put_off_.push_back(seq);
    return true;
}

int Engine::settle(uint64_t timeout_ns, bool interruptible) {
    const auto over = [&] {
        while (!put_off_.empty() && complete_locked(put_off_.front())) put_off_.pop_front();
        return put_off_.empty();
    };
    const uint64_t now = now_ns();
    return wait_until(over, timeout_ns > ~now ? ~0ull : now + timeout_ns, interruptible);
}

// 1: the predicate became true; 0: nothing completed within the patience; -1: interrupted. Evaluated under the mutex.
template <typename Predicate>
int Engine::wait_on_progress(Predicate predicate, uint64_t patience_ns) {
    uint64_t seen;
    {
        std::lock_guard lock(mutex_);
        for (Stream *active : active_) mark_stream(*active);
        seen = reached_;
    }
    for (;;) {
        bool over = false;
        const int got =
            wait_until([&] { return (over = predicate()) || reached_ != seen; }, now_ns() + patience_ns, true);
        if (got <= 0 || over) return got;
        std::lock_guard lock(mutex_);
        seen = reached_;
    }
}

int Engine::in_order(uint64_t number, uint64_t patience_ns) {
    if (work_stream_.load(std::memory_order_acquire) == number) return 1;
    if (passed_ == std::pair{number, applied() + 1}) return 1;
    use();
    static const Stream nowhere;  // for a number that no stream has: the driver then refuses the call
    Stream *found = stream(number);
    if (found) past(*found);
    const Stream &to = found ? *found : nowhere;
    const auto turn = [&] { return behind_all(to); };
    bool now;
    {
        std::lock_guard lock(mutex_);
        take_rests();
        now = turn();
    }
    const int got = now ? 1 : wait_on_progress(turn, patience_ns);
    if (got > 0) work_stream_.store(number, std::memory_order_release);
    return got;
}

bool Engine::behind(const RecordView &view, uint64_t &stream) {
    const uint32_t usual = usual_.load(std::memory_order_relaxed);
    if (usual == UINT32_MAX) return false;
    const size_t limit = std::min<size_t>(size_t{usual} + kSurplus, std::max<size_t>(usual + kLeast, ahead_ / 2));
    if (pending_.load(std::memory_order_relaxed) <= limit || !work_of(view, stream)) return false;
    std::lock_guard lock(mutex_);
    collect();
    return pending_ > limit && std::any_of(active_.begin(), active_.end(), [&](const Stream *active) {
        return active->number != stream && !active->pending.empty();
    });
}

// Live, too, a stream overtakes a bounded number of calls of others. Where a GPU is shared or slow for a while, the
// work under way would else cover whole steps of a program written for a lag of none, and a batch copied ahead would
// overwrite one that is still read. The device has work for as long as this waits. Work behind a gate may need a later
// call, and so may work that does not end: then the order is not enforced for a while, each time for longer.
bool Engine::stay_close(const RecordView &view) {
    if (pending_.load(std::memory_order_relaxed) <= kOvertaken || applied() < loose_until_) return true;
    uint64_t number;
    if (!work_of(view, number)) return true;
    const auto no_more_than = [&](size_t limit) {
        if (resting_ || host_functions_.load(std::memory_order_relaxed)) return true;
        size_t others = 0;
        for (const Stream *active : active_)
            if (active->number != number) others += active->pending.size();
        return others <= limit;
    };
    use();
    {
        std::lock_guard lock(mutex_);
        if (no_more_than(kOvertaken) || (collect() && no_more_than(kOvertaken))) return true;
    }
    const int got = wait_on_progress([&] { return no_more_than(kOvertakenLess); }, kStall);
    if (!got) {
        loose_until_ = applied() + loose_for_;
        loose_for_ *= 2;
    }
    return got >= 0;
}

int Engine::mark_every() const {
    if (!ordered_.load(std::memory_order_relaxed)) return kMarkEvery;
    return call_ns_ > 0 ? static_cast<int>(std::clamp(kMarked / call_ns_, 1.0, double(kMarkEvery))) : 1;
}

uint64_t Engine::reached() {
    std::lock_guard lock(mutex_);
    collect();
    return reached_;
}

uint32_t Engine::ahead() {
    std::lock_guard lock(mutex_);
    const size_t pending = pending_;
    return pending >= ahead_ / 2 ? UINT32_MAX : static_cast<uint32_t>(pending);
}

}  // namespace rgpu
