// Tracks what is complete: markers behind the work of each stream, polled by the poller or by a waiting thread. One
// marker covers everything before it.
#include "engine.hpp"

#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>

#include "shim_link.hpp"  // the data link has the same watermark

namespace rgpu {

namespace {
constexpr uint64_t kMicro = 1000;
constexpr uint64_t kPatience = 1'000'000'000;
constexpr uint64_t kMoment = 1'000'000;  // ns to wait for room before looking for the end of open host functions
constexpr double kGoal = 20e6;  // ns of work that may be submitted: the wait of a consistent snapshot
constexpr double kTurns = 100e6;  // the same of a device that others share, which does all of it in one turn
constexpr size_t kLeast = 8, kMost = 768;  // below the driver's own limit, about 1024 launches
}  // namespace

uint64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

void backoff(uint64_t waited_ns) {
    if (waited_ns < 50 * kMicro) {
        sched_yield();
        return;
    }
    timespec pause{0, static_cast<long>(std::min<uint64_t>(waited_ns / 8, 200 * kMicro))};
    nanosleep(&pause, nullptr);
}

void Engine::use() {
    thread_local Engine *here = nullptr;
    if (here == this && !several_) return;  // else the caller may have made another one current
    driver_.ctx_set_current(context_);
    here = this;
}

void Engine::use(CUcontext context) {
    if (several_) driver_.ctx_set_current(context);
}

void Engine::fail(CUresult result) {
    int none = 0;
    if (error_.compare_exchange_strong(none, result)) progress_ = true;
}

// A driver call was made for `seq` (0: a part of a call). An error of the call itself is returned, a sticky one kept.
CUresult Engine::keep(Stream &stream, CUresult result, uint64_t seq) {
    if (sticks(result)) {
        std::lock_guard lock(mutex_);
        fail(result);
        submit(stream, seq);
        return kSuccess;
    }
    if (result) return result;
    std::lock_guard lock(mutex_);
    submit(stream, seq);
    return kSuccess;
}

void Engine::submit(Stream &stream, uint64_t seq) {
    stream.worked = ++stream.tick;
    activate(stream);
    if (!seq) return;
    stream.pending.emplace_back(stream.tick, seq);
    ++pending_;
    if (stream.giving.seq == seq) stream.launched.push_back(stream.giving);
    if (stream.tick - stream.marked >= static_cast<uint64_t>(mark_every())) mark_stream(stream);
}

void Engine::mark_stream(Stream &stream) {
    if (stream.marked == stream.tick) return;
    CUevent event = nullptr;
    CUresult result = kSuccess;
    use(stream.context);
    auto &spare = spare_[stream.context];
    if (!spare.empty()) {
        event = spare.back();
        spare.pop_back();
    } else {
        result = driver_.event_create(&event, kEventDisableTiming);
    }
    if (!result) result = driver_.event_record(event, stream.handle);
    stream.marked = stream.tick;
    if (!result) {
        stream.markers.emplace_back(stream.tick, event);
        return;
    }
    if (event) spare.push_back(event);
    if (sticks(result)) fail(result);
    stream.markers.emplace_back(stream.tick, nullptr);  // no event will report it: it counts as reached
}

// Queries each stream once for its progress.
bool Engine::look_at_streams() {
    bool moved = false;
    for (size_t i = 0; i < active_.size();) {
        Stream &stream = *active_[i];
        if (stream.markers.empty() && stream.marked != stream.tick) mark_stream(stream);
        while (!stream.markers.empty()) {
            const auto [tick, event] = stream.markers.front();
            const CUresult result = event ? driver_.event_query(event) : error();
            if (result == kNotReady) break;
            if (result && sticks(result)) fail(result);
            stream.markers.pop_front();
            if (event) spare_[stream.context].push_back(event);
            reach(stream, tick, result);
            moved = true;
        }
        if (stream.done == stream.tick) {
            stream.active = false;
            resting_ -= stream.resting;
            active_[i] = active_.back();
            active_.pop_back();
        } else {
            ++i;
        }
    }
    return moved;
}

bool Engine::collect() {
    use();
    take_rests();
    const size_t before = pending_;
    bool moved = look_at_streams();
    // A stream's completed work may depend on another's that completed after its query: both are reported together.
    for (bool more = moved; more && awaiting_ && !active_.empty();) more = look_at_streams();
    tally();
    for (size_t i = 0; i < event_waits_.size();) {
        if (unfinished(event_waits_[i])) {
            ++i;
            continue;
        }
        Answer *answer = event_waits_[i].answer;
        event_waits_[i] = event_waits_.back();
        event_waits_.pop_back();
        finish(answer, kSuccess);
        drop(answer);
        moved = true;
    }
    if (!moved) return false;
    if (!leaving_.empty()) reap();
    measure(before - pending_);
    if (!progress_) {
        progress_ = true;
        if (!here_) out_.notify_one();
    }
    return true;
}

void Engine::reap() {
    std::erase_if(leaving_, [](const auto &stream) { return !stream->active; });
}

// The time that a call keeps the device busy decides how many may be submitted ahead. Where a GPU is shared, most of it
// is the wait for a turn: if all is complete at once while more is held back, the turn had room for more.
void Engine::measure(size_t completed) {
    const uint64_t now = now_ns();
    if (completed) {
        if (held_back_.load(std::memory_order_relaxed)) turns_ = !pending_;
        const double each = static_cast<double>(now - busy_since_) / static_cast<double>(completed);
        call_ns_ = call_ns_ ? call_ns_ * 0.8 + each * 0.2 : each;
        const double fit = (turns_ ? kTurns : kGoal) / std::max(call_ns_, 1.0);
        ahead_ = static_cast<size_t>(std::clamp(fit, double(kLeast), double(kMost)));
    }
    busy_since_ = now;
}

void Engine::reach(Stream &stream, uint64_t tick, CUresult result) {
    stream.done = tick;
    ++reached_;
    while (!stream.pending.empty() && stream.pending.front().first <= tick) {
        stream.done_seq = stream.pending.front().second;
        stream.pending.pop_front();
        --pending_;
    }
    while (!stream.launched.empty() && stream.launched.front().seq <= stream.done_seq) stream.launched.pop_front();
    std::erase_if(stream.functions, [&](const auto &function) { return function.second <= tick; });
    while (!stream.actions.empty() && stream.actions.front().tick <= tick) {
        Action action = stream.actions.front();
        stream.actions.pop_front();
        act(action, result);
    }
}

bool Engine::unfinished(const EventWait &wait) {
    if (error()) return false;
    if (wait.event) return driver_.event_query(wait.event) == kNotReady;
    if (auto found = streams_.find(wait.stream); found != streams_.end()) return found->second->done < wait.tick;
    return std::any_of(leaving_.begin(), leaving_.end(),
                       [&](const auto &stream) { return stream->number == wait.stream && stream->done < wait.tick; });
}

// The event is recorded anew: waits for its old record use the tick of its stream.
void Engine::settle_event(CUevent event) {
    for (EventWait &wait : event_waits_)
        if (wait.event == event) wait.event = nullptr;
}

bool Engine::complete_locked(uint64_t seq) {
    for (Stream *stream : active_) {
        const auto &pending = stream->pending;
        auto at = std::lower_bound(pending.begin(), pending.end(), seq,
                                   [](const auto &item, uint64_t value) { return item.second < value; });
        if (at != pending.end() && at->second == seq) return false;
    }
    return std::none_of(event_waits_.begin(), event_waits_.end(),
                        [&](const EventWait &wait) { return wait.answer->seq == seq; });
}

bool Engine::idle_locked() { return active_.empty() && event_waits_.empty() && callbacks_.empty(); }

bool Engine::is_complete(uint64_t seq) {
    std::lock_guard lock(mutex_);
    return complete_locked(seq);
}

bool Engine::wait_complete(uint64_t seq, uint64_t timeout_ns) {
    return wait_until([&] { return complete_locked(seq); }, now_ns() + timeout_ns, false) > 0;
}

bool Engine::drain(uint64_t timeout_ns) {
    return wait_until([&] { return idle_locked(); }, now_ns() + timeout_ns, false) > 0;
}

uint64_t Engine::worked() {
    std::lock_guard lock(mutex_);
    return worked_ns_ + (works_ ? now_ns() - active_since_ : 0);
}

size_t Engine::progress(uint64_t *pending, size_t pending_size, uint64_t *streams, size_t streams_size,
                        size_t *pairs) {
    std::lock_guard lock(mutex_);
    size_t count = 0;
    for (Stream *stream : active_)
        if (!stream->pending.empty() && count < pending_size) pending[count++] = stream->pending.front().second;
    for (const EventWait &wait : event_waits_)
        if (count < pending_size) pending[count++] = wait.answer->seq;
    *pairs = 0;
    for (const auto &[number, stream] : streams_)
        if (stream->done_seq && *pairs < streams_size) {
            streams[2 * *pairs] = number;
            streams[2 * *pairs + 1] = stream->done_seq;
            ++*pairs;
        }
    return count;
}

// Which kernel an unfinished call launches; false: none, or it is complete.
bool Engine::launched(uint64_t seq, uint64_t *module, uint32_t *function) {
    std::lock_guard lock(mutex_);
    for (Stream *stream : active_) {
        auto at = std::lower_bound(stream->launched.begin(), stream->launched.end(), seq,
                                   [](const Launched &item, uint64_t value) { return item.seq < value; });
        if (at == stream->launched.end() || at->seq != seq) continue;
        *module = at->module;
        *function = at->function;
        return true;
    }
    return false;
}

// Writes the body of a WATERMARK message: only streams that moved since the last one, unless `whole`. 0: nothing new.
size_t Engine::watermark(uint8_t *body, size_t size, bool whole, int broken) {
    const uint64_t position = applied();  // first: calls applied later are pending or not counted
    std::lock_guard lock(mutex_);
    uint64_t done = position;
    for (Stream *stream : active_)
        if (!stream->pending.empty()) done = std::min(done, stream->pending.front().second - 1);
    for (const EventWait &wait : event_waits_) done = std::min(done, wait.answer->seq - 1);
    const int sticky = error() ? error() : broken;
    uint8_t *at = body + sizeof(wire::WatermarkHead);
    uint32_t count = 0;
    for (const auto &[number, stream] : streams_) {
        if (stream->done_seq == 0 || (!whole && stream->done_seq == stream->reported)) continue;
        const wire::StreamMark mark{number, stream->done_seq};
        if (at + sizeof mark > body + size) break;
        std::memcpy(at, &mark, sizeof mark);
        stream->reported = stream->done_seq;
        at += sizeof mark;
        ++count;
    }
    last_watermark_ = now_ns();
    progress_ = false;
    if (!whole && !count && done == last_done_ && sticky == last_error_) return 0;
    last_done_ = done;
    last_error_ = sticky;
    const wire::WatermarkHead head{done, static_cast<uint32_t>(sticky), count};
    std::memcpy(body, &head, sizeof head);
    return static_cast<size_t>(at - body);
}

// Bounds how far submission runs ahead: of work longer than the goal, by a few calls only. `ahead`: with a host
// function open this does not wait here, since its end may be a record not yet read.
Pace Engine::keep_pace() {
    if (pending_ <= ahead_ || applied() < patient_until_) return Pace::on;
    held_back_.store(true, std::memory_order_relaxed);
    const Pace pace = wait_for_room();
    held_back_.store(false, std::memory_order_relaxed);
    return pace;
}

Pace Engine::wait_for_room() {
    const auto room = [&] { return pending_ <= ahead_ / 2 + 1; };
    const bool may_hold = host_functions_.load(std::memory_order_relaxed);
    int got = wait_until(room, now_ns() + (may_hold ? kMoment : kPatience), true);
    if (got == 0 && may_hold) {
        if (ahead_at_ != applied()) {
            ahead_at_ = applied();
            ahead_until_ = now_ns() + kPatience;
        }
        return Pace::ahead;
    }
    // Behind a gate the driver's queue must not fill up: the submitting thread would wait inside it, holding locks of
    // both.
    const auto unfilled = [&] { return pending_ < kMost || !resting_; };
    while (got == 0 && (got = wait_until(unfilled, now_ns() + kPatience, true)) == 0) {}
    // The device's work may wait for a call that was not applied yet (SEMANTICS 19).
    if (got > 0 && pending_ > ahead_ / 2 + 1) patient_until_ = applied() + kMarkEvery;
    return got < 0 ? Pace::interrupted : Pace::on;
}

bool Engine::may_go_on(uint64_t timeout_ns) {
    // The caller at the boundary counts that time, so it is not counted here.
    if (wait_until([&] { return pending_ <= ahead_ / 2 + 1; }, now_ns() + timeout_ns, false)) return true;
    if (now_ns() < ahead_until_ || (resting_ && pending_ >= kMost)) return false;
    patient_until_ = applied() + kMarkEvery;
    return true;
}

void Engine::poll() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // ns: short sleeps need a small slack
    use();
    std::unique_lock lock(mutex_);
    while (!stopped_) {
        if (active_.empty() && event_waits_.empty()) {
            busy_.wait(lock);
            continue;
        }
        if (!here_) collect();
        if (awaiting_ && !here_ && now_ns() - awaited_since_ < 100 * kMicro) {
            lock.unlock();
            sched_yield();
            lock.lock();
        } else {
            busy_.wait_for(lock, std::chrono::microseconds(awaiting_ && !here_ ? 20 : 200));
        }
    }
}

}  // namespace rgpu
