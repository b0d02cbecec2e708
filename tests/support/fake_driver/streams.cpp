// Streams, events and waits of the fake driver. Each stream is a thread that runs its work in order.
// FAKE_DRIVER_DELAY_US: each piece of work takes that long. After fake_print_at(2) cuStreamSynchronize does not return
// before that is changed. After fake_queue(n) no stream takes more than n pieces of work: who gives more waits.
#include "driver.hpp"

void fake::Stream::run() {
    static const long delay = getenv("FAKE_DRIVER_DELAY_US") ? atol(getenv("FAKE_DRIVER_DELAY_US")) : 0;
    std::unique_lock guard(lock);
    for (;;) {
        given.wait(guard, [&] { return !work.empty(); });
        auto &item = work.front();
        guard.unlock();
        if (delay) usleep(static_cast<useconds_t>(delay));
        const bool done = sticky || item();
        guard.lock();
        if (!done) {
            changed.wait_for(guard, std::chrono::microseconds(50));
            continue;
        }
        work.pop_front();
        changed.notify_all();
    }
}

namespace {

Stream *legacy() {
    static auto &all = *new std::map<void *, Stream *>;
    static auto &guard = *new std::mutex;
    std::lock_guard held(guard);
    Stream *&stream = all[current];
    if (!stream) stream = new Stream(true);
    return stream;
}

double milliseconds() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

}  // namespace

Stream *fake::of(void *handle) { return reinterpret_cast<uintptr_t>(handle) <= 2 ? legacy() : static_cast<Stream *>(handle); }

uint64_t fake::realtime() {
    timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

Result fake::give(void *handle, std::function<bool()> work) {
    if (sticky) return sticky;
    if (const uint32_t id = std::exchange(traced, 0))
        work = [id, work = std::move(work), begun = uint64_t{0}]() mutable {
            if (!begun) begun = realtime();
            if (!work()) return false;
            if (auto done = trace_done.load()) done(id, begun, realtime());
            return true;
        };
    if (int error = injected.exchange(0)) return error;
    if (of(handle)->context != current) return 201;
    std::unique_lock guard(lock);
    changed.wait(guard, [&] { return !queue || of(handle)->work.size() < queue; });
    of(handle)->work.push_back(std::move(work));
    of(handle)->given.notify_one();
    return 0;
}
Result fake::give_once(void *handle, std::function<void()> work) {
    return give(handle, [work = std::move(work)] { return work(), true; });
}

void fake::rest() {  // until no stream has work
    const auto busy = [] {
        std::lock_guard guard(streams_lock);
        return std::any_of(streams.begin(), streams.end(), [](Stream *s) { return !s->work.empty(); });
    };
    std::unique_lock guard(lock);
    while (loads_wait && busy()) changed.wait_for(guard, std::chrono::milliseconds(1));
}

API Result cuStreamCreateWithPriority(void **stream, unsigned flags, int) { return *stream = new Stream(!(flags & 1)), 0; }
API Result cuStreamCreate(void **stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
API Result cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
API Result cuStreamDestroy_v2(void *) { return 0; }
API Result cuStreamSynchronize(void *stream) {
    std::unique_lock guard(lock);
    changed.wait(guard, [&] { return of(stream)->work.empty(); });
    guard.unlock();
    while (print_at == 2) usleep(1000);
    if (!print_at) print_out();
    return sticky;
}
API Result cuCtxSynchronize() {
    std::unique_lock guard(lock);
    changed.wait(guard, [] {
        std::lock_guard inner(streams_lock);
        return std::all_of(streams.begin(), streams.end(),
                           [](Stream *s) { return s->context != current || s->work.empty(); });
    });
    guard.unlock();
    print_out();
    return sticky;
}
API Result cuStreamWaitEvent(void *stream, void *handle, unsigned) {
    auto *event = static_cast<Event *>(handle);
    std::unique_lock guard(lock);
    const std::shared_ptr<bool> reached = event->reached;
    guard.unlock();
    return give(stream, [=] {
        std::lock_guard inner(lock);
        return *reached;
    });
}
API Result cuStreamWaitValue32_v2(void *stream, Ptr at, uint32_t value, unsigned) {
    return give(stream, [=] { return static_cast<int32_t>(*reinterpret_cast<volatile uint32_t *>(at) - value) >= 0; });
}
API Result cuStreamWriteValue32_v2(void *stream, Ptr at, uint32_t value, unsigned) {
    return give_once(stream, [=] { *reinterpret_cast<volatile uint32_t *>(at) = value; });
}
API Result cuStreamWaitValue64_v2(void *stream, Ptr at, uint64_t value, unsigned) {
    return give(stream, [=] { return static_cast<int64_t>(*reinterpret_cast<volatile uint64_t *>(at) - value) >= 0; });
}
API Result cuStreamWriteValue64_v2(void *stream, Ptr at, uint64_t value, unsigned) {
    return give_once(stream, [=] { *reinterpret_cast<volatile uint64_t *>(at) = value; });
}
API Result cuStreamIsCapturing(void *, int *status) { return *status = 0, 0; }
API Result cuEventCreate(void **event, unsigned) { return *event = new Event, 0; }
API Result cuEventDestroy_v2(void *) { return 0; }
API Result cuEventRecord(void *handle, void *stream) {
    auto *event = static_cast<Event *>(handle);
    if (event->context != of(stream)->context) return 400;
    const auto reached = std::make_shared<bool>(false);
    {
        std::lock_guard guard(lock);
        event->reached = reached;
    }
    return give_once(stream, [=] {
        std::lock_guard guard(lock);
        *reached = true;
        event->when = milliseconds();
    });
}
API Result cuEventQuery(void *handle) {
    auto *event = static_cast<Event *>(handle);
    if (sticky) return sticky;
    std::lock_guard guard(lock);
    return *event->reached ? 0 : 600;
}
API Result cuEventSynchronize(void *handle) {
    auto *event = static_cast<Event *>(handle);
    std::unique_lock guard(lock);
    const std::shared_ptr<bool> reached = event->reached;
    changed.wait(guard, [&] { return *reached || sticky; });
    return sticky;
}
API Result cuEventElapsedTime_v2(float *ms, void *from, void *to) {
    if (static_cast<Event *>(from)->context != static_cast<Event *>(to)->context) return 400;
    *ms = static_cast<float>(static_cast<Event *>(to)->when - static_cast<Event *>(from)->when);
    return 0;
}
API Result cuEventElapsedTime(float *ms, void *from, void *to) { return cuEventElapsedTime_v2(ms, from, to); }
