// A CUPTI for the fake driver: it records launches of kernels, kLength long, with the numbers that its callback was
// told. A test may have it lose records (fake_cupti_lose). It delivers records once no recorded kernel is under way.
#include <dlfcn.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {
constexpr uint64_t kLength = 12345;  // ns that each kernel is said to have taken
constexpr size_t kRecord = 216;      // CUpti_ActivityKernel10
using Callback = void (*)(void *, int, uint32_t, const void *);
Callback callback = nullptr;
void (*request)(uint8_t **, size_t *, size_t *) = nullptr;
void (*complete)(void *, uint32_t, uint8_t *, size_t, size_t) = nullptr;
std::atomic<bool> calls{false}, kernels{false}, losing{false};
std::atomic<uint32_t> number{0};
std::atomic<int> under_way{0}, flushes{0};
std::mutex mutex;
struct Record {
    uint32_t number;
    uint64_t start, length;
};
auto &records = *new std::vector<Record>;

uint32_t begun() {
    const uint32_t mine = ++number;
    uint8_t data[72]{};
    std::memcpy(data + 64, &mine, 4);
    callback(nullptr, 1, 307, data);
    const uint32_t exit = 1;
    std::memcpy(data, &exit, 4);
    callback(nullptr, 1, 307, data);
    ++under_way;
    return mine;
}

void done(uint32_t mine, uint64_t start, uint64_t) {
    if (!losing && kernels) {
        std::lock_guard lock(mutex);
        records.push_back({mine, start, kLength});
    }
    --under_way;
}

void trace() {
    const auto hook = reinterpret_cast<void (*)(uint32_t (*)(), void (*)(uint32_t, uint64_t, uint64_t))>(
        dlsym(RTLD_DEFAULT, "fake_trace"));
    if (hook) hook(calls && kernels ? begun : nullptr, done);
}
}  // namespace

API void fake_cupti_lose(int on) { losing = on; }
API int fake_cupti_records() { return calls && kernels; }
API int cuptiSubscribe(void **subscriber, Callback given, void *) {
    *subscriber = &records;
    return callback = given, 0;
}
API int cuptiEnableDomain(uint32_t on, void *, int domain) {
    calls = on && domain == 1;
    return trace(), 0;
}
API int cuptiActivityRegisterCallbacks(decltype(request) wanted, decltype(complete) filled) {
    return request = wanted, complete = filled, 0;
}
API int cuptiActivityEnable(int kind) {
    if (kind == 10) kernels = true;
    return trace(), 0;
}
API int cuptiActivityDisable(int kind) {
    if (kind == 10) kernels = false;
    return trace(), 0;
}
API int cuptiGetTimestamp(uint64_t *time) {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return *time = static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec), 0;
}
// A record of a test's own, which began so many ns ago.
API void fake_cupti_add(uint32_t number, uint64_t ago, uint64_t length) {
    uint64_t now;
    cuptiGetTimestamp(&now);
    std::lock_guard lock(mutex);
    records.push_back({number, now - ago, length});
}
API int fake_cupti_flushes() { return flushes; }
API int cuptiActivityFlushAll(uint32_t) {
    ++flushes;
    if (under_way) return 0;
    std::lock_guard lock(mutex);
    while (!records.empty()) {
        uint8_t *buffer;
        size_t size, most, used = 0;
        request(&buffer, &size, &most);
        for (; !records.empty() && used + kRecord <= size; used += kRecord) {
            const auto [mine, start, length] = records.back();
            records.pop_back();
            const uint32_t kind = 10;
            const uint64_t end = start + length;
            std::memset(buffer + used, 0, kRecord);
            std::memcpy(buffer + used, &kind, 4);
            std::memcpy(buffer + used + 16, &start, 8);
            std::memcpy(buffer + used + 24, &end, 8);
            std::memcpy(buffer + used + 92, &mine, 4);
        }
        complete(nullptr, 0, buffer, size, used);
    }
    return 0;
}
API int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, uint8_t **at) {
    uint8_t *next = *at ? *at + kRecord : buffer;
    if (next + kRecord > buffer + valid) return 12;
    return *at = next, 0;
}
