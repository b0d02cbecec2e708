#include "activity.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
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
std::mutex mutex;  // of `ready`, `recording` and the subscription
bool ready = false, recording = false;
void *subscriber = nullptr;
std::mutex finished_mutex;
auto &finished = *new std::vector<Work>;  // never destroyed: CUPTI's thread outlives this library's objects
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
        finished.push_back({field<uint32_t>(at, where), kind, field<uint64_t>(at, kStart), field<uint64_t>(at, kEnd)});
    }
    std::free(buffer);
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
    return failed;
}

size_t collect(Work *out, size_t room) {
    cupti.flush(0);  // without force: only buffers whose work is complete
    std::lock_guard lock(finished_mutex);
    const size_t count = std::min(room, finished.size());
    std::copy_n(finished.begin(), count, out);
    finished.erase(finished.begin(), finished.begin() + static_cast<ptrdiff_t>(count));
    return count;
}

uint64_t now() {
    uint64_t time = 0;
    return !cupti.timestamp || cupti.timestamp(&time) ? 0 : time;
}

uint32_t last_call() {
    const uint32_t found = correlation;
    correlation = 0;
    return found;
}

}  // namespace rgpu::activity
