// Calls that a profiler times (`timed`, docs/developers/links/profiling.md), applied without Python: launches, memsets
// and copies on the device. Events around the work bound when it was done; CUPTI's record, where there is one, says how
// long it took. As rgpu/server/device/cuda/times/timing.py does it, which applies the others, and the first of each second.
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine.hpp"

namespace rgpu {

namespace {
constexpr uint64_t kBaseAge = 1'000'000'000;   // ns
constexpr uint64_t kPatience = 200'000'000;    // ns to wait for the record of complete work
constexpr uint64_t kAgain = 1'000'000'000;     // ns, after one that did not come, in which none is waited for
constexpr auto kPause = std::chrono::milliseconds(1);

struct Times {  // the reply: a blob (rgpu/session/objects/spans.py) with one span of kind CALL
    uint32_t size;
    uint8_t head[32], span[88];
};
static_assert(sizeof(Times) == kTimes);

template <class Value>
void store(uint8_t *at, size_t offset, Value value) {
    std::memcpy(at + offset, &value, sizeof value);
}
}  // namespace

size_t write_times(const Answer &answer, uint8_t *out) {
    if (!answer.timed || answer.result) return 0;
    Times times{sizeof times.head + sizeof times.span, {}, {}};
    store(times.head, 0, answer.clock);
    store(times.head, 8, answer.received);
    store(times.head, 16, answer.answered);
    store(times.head, 24, uint32_t{1});
    store(times.span, 56, answer.began);
    store(times.span, 64, answer.ended);
    std::memcpy(out, &times, sizeof times);
    return sizeof times;
}

void Engine::time_base(CUcontext context, TimeBase base, uint64_t clock) {
    bases_[context] = base;
    clock_ = clock;
}

// Whether the record is a timed call that is applied here; `inner`: the call that it wraps.
bool Engine::timed_here(const RecordView &view, RecordView &inner) {
    wire::Timed call;
    if (view.header.call != wire::Timed::id || pass_all_ || view.header.payload_len || bases_.empty() || error() ||
        broken_.load(std::memory_order_acquire) || ordered_.load(std::memory_order_acquire) ||
        !call.read(view.args, view.header.args_len))
        return false;
    switch (call.call) {
        case wire::Launch::id:
        case wire::GraphLaunch::id:
        case wire::Memset::id:
        case wire::MemcpyD2d::id:
        case wire::Memcpy2dD2d::id: break;
        default: return false;  // with a payload, or bytes in its answer
    }
    const auto on = streams_.find(call.stream);
    if (on == streams_.end()) return false;
    const auto base = bases_.find(on->second->context);
    if (base == bases_.end() || now_ns() - base->second.ns > kBaseAge) return false;
    inner.header = view.header;
    inner.header.call = call.call;
    inner.header.args_len = call.arguments.size;
    inner.args = static_cast<const uint8_t *>(call.arguments.data);
    uint64_t stream;
    return work_of(inner, stream) && stream == call.stream;
}

CUevent Engine::timing_event(CUcontext context) {
    {
        std::lock_guard lock(mutex_);
        if (auto &spare = spare_timing_[context]; !spare.empty()) {
            const CUevent event = spare.back();
            spare.pop_back();
            return event;
        }
    }
    CUevent event = nullptr;
    return driver_.event_create(&event, 0) ? nullptr : event;
}

Outcome Engine::apply_timed(const RecordView &inner, Bad &bad) {
    if (const Pace pace = keep_pace(); pace != Pace::on)
        return pace == Pace::ahead ? Outcome::ahead : Outcome::interrupted;
    const uint64_t received = now_ns(), seq = inner.header.seq;
    uint64_t number = 0;
    work_of(inner, number);
    Stream &on = *stream(number);
    const TimeBase base = bases_[on.context];
    const CUevent first = timing_event(on.context), last = timing_event(on.context);
    if (!first || !last) return Outcome::handed;
    time(first, last);
    bool decoded = true;
    const CUresult result = call(inner, false, decoded);
    const bool taken = timed();
    const uint32_t correlation = traced();
    if (!decoded || result) {
        {
            std::lock_guard lock(mutex_);
            for (const CUevent event : {first, last}) spare_timing_[on.context].push_back(event);
        }
        if (!decoded) bad = Bad::arguments;
        else if (result == kOutOfMemory) return Outcome::handed;  // Python makes room, and tries again
        else {
            answer_now(seq, result, false);
            argument_error(inner.header.call, seq, result);
        }
        return Outcome::applied;
    }
    if (!taken)  // no work was needed
        for (const CUevent event : {first, last}) driver_.event_record(event, on.handle);
    std::lock_guard lock(mutex_);
    if (!timer_.joinable()) timer_ = std::thread([this] { time_calls(); });
    Answer *answer = expect(seq, false, true);
    answer->clock = clock_;
    answer->received = received;
    ++timed_open_;
    Action action{.kind = Action::time, .tick = on.tick};
    action.timed = new TimedCall{answer, base, on.context, first, last, base.recorded && taken ? correlation : 0, 0};
    if (on.done >= on.tick) act(action, kSuccess);
    else on.actions.push_back(action);
    return Outcome::applied;
}

// Answers ended calls in the order in which they ended.
void Engine::time_calls() {
    prctl(PR_SET_NAME, "cuda-times");
    use();
    std::unique_lock lock(mutex_);
    while (!stopped_) {
        if (ended_.empty()) {
            times_.wait(lock);
            continue;
        }
        if (ended_.front()->correlation) {
            lock.unlock();
            activity::collect();
            lock.lock();
        }
        while (!ended_.empty() && settle(*ended_.front())) {
            delete ended_.front();
            ended_.pop_front();
        }
        if (!ended_.empty() && !stopped_) times_.wait_for(lock, kPause);
    }
}

// Whether it was answered; if not its record may yet come. The caller holds the mutex.
bool Engine::settle(TimedCall &timed) {
    uint64_t start = 0, end = 0;
    const uint64_t now = now_ns();
    if (timed.correlation) {
        if (activity::take(timed.correlation, timed.complete, &start, &end)) {
            missing_since_ = 0;
        } else if (now >= without_until_) {
            if (!missing_since_) missing_since_ = now;
            if (now - missing_since_ <= kPatience) return false;
            missing_since_ = 0;
            without_until_ = now + kAgain;
        }
    }
    float after = 0, length = 0;  // ms
    CUresult result = error();
    if (!result) result = driver_.event_elapsed(&after, timed.base.event, timed.first);
    if (!result) result = driver_.event_elapsed(&length, timed.first, timed.last);
    Answer *answer = timed.answer;
    if (!result) {
        for (const CUevent event : {timed.first, timed.last}) spare_timing_[timed.context].push_back(event);
        answer->began = timed.base.ns + static_cast<uint64_t>(static_cast<double>(after) * 1e6);
        answer->ended = answer->began + std::max<uint64_t>(1, static_cast<uint64_t>(static_cast<double>(length) * 1e6));
        if (end) {  // CUPTI's clock is not the one of the base: they differ by more than short work takes
            const uint64_t took = std::max<uint64_t>(1, end - start);
            answer->began = std::max(answer->began, std::min(start, answer->ended - took));
            answer->ended = answer->began + took;
        }
    }
    answer->answered = now;
    finish(answer, result);
    --timed_open_;
    drop(answer);
    return true;
}

void Engine::queue_times(Answer *answer) {
    if (!attached_) return;
    ++answer->references;
    times_queue_.push_back(answer);
    out_.notify_one();
}

size_t Engine::take_times(uint8_t *out, size_t room) {
    std::lock_guard lock(mutex_);
    size_t used = 0;
    for (; !times_queue_.empty() && used + 16 + kTimes <= room; times_queue_.pop_front()) {
        Answer *answer = times_queue_.front();
        const auto size = static_cast<uint32_t>(write_times(*answer, out + used + 16));
        store(out, used, answer->seq);
        store(out, used + 8, int32_t{answer->result});
        store(out, used + 12, size);
        used += 16 + size;
        drop(answer);
    }
    return used;
}

bool Engine::times_drained(uint64_t timeout_ns) {
    return wait_until([&] { return !timed_open_; }, now_ns() + timeout_ns, false) > 0;
}

}  // namespace rgpu
