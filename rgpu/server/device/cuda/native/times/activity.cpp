#include "activity.hpp"

#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace rgpu::activity {
namespace {
using Result = int;
constexpr int kMemcpy = 1, kMemset = 2, kConcurrentKernel = 10;  // CUpti_ActivityKind
constexpr int kDriverDomain = 1;                                  // CUpti_CallbackDomain
constexpr uint32_t kEnter = 0;                                    // CUpti_ApiCallbackSite
constexpr size_t kCorrelationOfCall = 64;                         // CUpti_CallbackData::correlationId
constexpr size_t kStart = 16, kEnd = 24;                          // of all three records
constexpr size_t kCorrelationOfKernel = 92, kCorrelationOfCopy = 44;
constexpr size_t kBuffer = 256 << 10, kAlignment = 8, kMost = 1 << 20;
constexpr uint64_t kCollect = 5'000'000;    // ns between two collections
constexpr uint64_t kClock = 1'000'000'000;  // age at which the offset of CUPTI's clock is measured again, ns
constexpr int kClockTries = 5;              // readings of both clocks; the narrowest counts
constexpr size_t kKept = 1 << 16;           // calls whose records are kept until they are asked for

struct Functions {
    Result (*subscribe)(void **, void (*)(void *, int, uint32_t, const void *), void *);
    Result (*enable_domain)(uint32_t, void *, int);
    Result (*register_callbacks)(void (*)(uint8_t **, size_t *, size_t *),
                                 void (*)(void *, uint32_t, uint8_t *, size_t, size_t));
    Result (*enable)(int);
    Result (*disable)(int);
    Result (*flush)(uint32_t);
    Result (*next)(uint8_t *, size_t, uint8_t **);
    Result (*timestamp)(uint64_t *);
} cupti;
std::mutex mutex;  // of `recording` and the subscription
std::atomic<bool> ready{false};
bool recording = false;
void *subscriber = nullptr;
struct Work {
    uint32_t correlation;
    uint64_t start, end;  // ns, on CUPTI's clock
};
std::mutex finished_mutex;
auto &finished = *new std::vector<Work>;  // never destroyed: CUPTI's thread outlives this library's objects

struct Span {
    uint64_t start, end;  // ns of CLOCK_MONOTONIC
};
std::mutex kept_mutex;
auto &kept = *new std::unordered_map<uint32_t, Span>;  // by correlation id
auto &kept_order = *new std::deque<uint32_t>;          // oldest first; those that were taken, too
uint64_t collected = 0;                                // when the last collection began; written with both locks

std::mutex collecting;  // also guards the two below
uint64_t measured = 0;
int64_t ahead = 0;  // ns that CUPTI's clock is ahead, as measured then

thread_local uint32_t correlation = 0;

template <class Field>
Field field(const void *record, size_t offset) {
    Field value;
    std::memcpy(&value, static_cast<const uint8_t *>(record) + offset, sizeof value);
    return value;
}

void called(void *, int, uint32_t, const void *data) {
    if (field<uint32_t>(data, 0) == kEnter) correlation = field<uint32_t>(data, kCorrelationOfCall);
}

void wanted(uint8_t **buffer, size_t *size, size_t *most) {
    *buffer = static_cast<uint8_t *>(std::aligned_alloc(kAlignment, kBuffer));
    *size = *buffer ? kBuffer : 0;
    *most = 0;
}

void filled(void *, uint32_t, uint8_t *buffer, size_t, size_t valid) {
    uint8_t *at = nullptr;
    std::lock_guard lock(finished_mutex);
    while (!cupti.next(buffer, valid, &at)) {
        const auto kind = field<uint32_t>(at, 0);
        if (kind != kMemcpy && kind != kMemset && kind != kConcurrentKernel) continue;
        const size_t where = kind == kConcurrentKernel ? kCorrelationOfKernel : kCorrelationOfCopy;
        if (finished.size() >= kMost) finished.clear();  // nobody has asked for long: what is missing is timed by events
        finished.push_back({field<uint32_t>(at, where), field<uint64_t>(at, kStart), field<uint64_t>(at, kEnd)});
    }
    std::free(buffer);
}

uint64_t monotonic() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

void measure_clock(uint64_t now) {
    if (measured && now - measured <= kClock) return;
    uint64_t narrowest = ~uint64_t{0};
    for (int i = 0; i < kClockTries; ++i) {
        uint64_t there = 0;
        const uint64_t before = monotonic();
        cupti.timestamp(&there);
        const uint64_t after = monotonic();
        if (after - before >= narrowest) continue;
        narrowest = after - before;
        ahead = static_cast<int64_t>(there - (before + after) / 2);
    }
    measured = now;
}
}  // namespace

std::string open(const char *path) {
    std::lock_guard lock(mutex);
    if (ready) return {};
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return dlerror();
    const std::pair<const char *, void *> wants[] = {
        {"cuptiSubscribe", &cupti.subscribe},           {"cuptiEnableDomain", &cupti.enable_domain},
        {"cuptiActivityEnable", &cupti.enable},         {"cuptiActivityDisable", &cupti.disable},
        {"cuptiActivityFlushAll", &cupti.flush},        {"cuptiActivityGetNextRecord", &cupti.next},
        {"cuptiGetTimestamp", &cupti.timestamp},        {"cuptiActivityRegisterCallbacks", &cupti.register_callbacks}};
    for (const auto &[name, place] : wants) {
        void *found = dlsym(library, name);
        if (!found) return std::string(path) + " lacks " + name;
        std::memcpy(place, &found, sizeof found);
    }
    if (const Result result = cupti.subscribe(&subscriber, called, nullptr))
        return "cuptiSubscribe: result " + std::to_string(result);
    if (const Result result = cupti.register_callbacks(wanted, filled))
        return "cuptiActivityRegisterCallbacks: result " + std::to_string(result);
    ready = true;
    return {};
}

int record(bool on) {
    std::lock_guard lock(mutex);
    if (!ready || on == recording) return 0;
    Result failed = cupti.enable_domain(on, subscriber, kDriverDomain);
    for (const int kind : {kConcurrentKernel, kMemcpy, kMemset})
        if (const Result result = on ? cupti.enable(kind) : cupti.disable(kind); result && !failed) failed = result;
    recording = on && !failed;
    if (on && failed) cupti.enable_domain(0, subscriber, kDriverDomain);
    if (recording) return 0;
    std::lock_guard lock_kept(kept_mutex);
    kept.clear();
    kept_order.clear();
    return failed;
}

void collect() {
    std::unique_lock only(collecting, std::try_to_lock);
    const uint64_t now = monotonic();
    if (!only || now - collected < kCollect || !ready) return;
    cupti.flush(0);  // without force: only buffers whose work is complete
    measure_clock(now);
    std::vector<Work> found;
    {
        std::lock_guard lock(finished_mutex);
        found.swap(finished);
    }
    std::lock_guard lock(kept_mutex);
    for (const Work &work : found) {
        const Span span{work.start - static_cast<uint64_t>(ahead), work.end - static_cast<uint64_t>(ahead)};
        const auto [at, fresh] = kept.try_emplace(work.correlation, span);
        if (fresh) kept_order.push_back(work.correlation);
        at->second = {std::min(at->second.start, span.start), std::max(at->second.end, span.end)};
    }
    for (; kept_order.size() > kKept; kept_order.pop_front()) kept.erase(kept_order.front());
    collected = now;
}

bool take(uint32_t correlation, uint64_t complete, uint64_t *start, uint64_t *end) {
    std::lock_guard lock(kept_mutex);
    const auto found = kept.find(correlation);
    if (collected <= complete || found == kept.end()) return false;
    *start = found->second.start;
    *end = found->second.end;
    kept.erase(found);
    return true;
}

uint32_t last_call() {
    const uint32_t found = correlation;
    correlation = 0;
    return found;
}

}  // namespace rgpu::activity
