#include "summing.hpp"

#include "crc32.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <mutex>

namespace rgpu {

namespace {
constexpr uint32_t kPolynomial = 0xEDB88320u;
constexpr uint32_t kOne = 0x80000000u;  // x^0, in reflected bit order
constexpr size_t kShare = 256 * 1024;   // bytes for which a thread is worth waking
constexpr unsigned kHelpers = 3;        // RGPU_SUM_THREADS: fewer

// The product of two polynomials modulo the CRC's.
constexpr uint32_t times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = kOne; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);
    }
    return product;
}

// x^8, x^16, x^32 …: what so many bytes behind a message multiply its remainder by, for each power of two.
constexpr auto make_powers() {
    std::array<uint32_t, 64> powers{};
    powers[0] = kOne >> 8;
    for (size_t k = 1; k < powers.size(); ++k) powers[k] = times(powers[k - 1], powers[k - 1]);
    return powers;
}
constexpr auto kPowers = make_powers();

struct Part {
    const uint8_t *data;
    size_t size;
    uint32_t crc;
    bool done;
};

struct Helpers {
    std::mutex lock;
    std::condition_variable work, finished;
    std::deque<Part *> queue;
    unsigned started = 0;
};

Helpers &all_helpers() {
    static auto *all = new Helpers;  // its threads may outlive static destructors
    return *all;
}

unsigned wanted_helpers() {
    static const unsigned count = [] {
        if (const char *text = std::getenv("RGPU_SUM_THREADS"))
            return static_cast<unsigned>(std::clamp(std::strtol(text, nullptr, 10), 0l, static_cast<long>(kHelpers)));
        cpu_set_t set;
        const int processors = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
        return processors < 8 ? 0u : kHelpers;
    }();
    return count;
}

// The oldest part that waits. The lock is held before and after, and not while it is summed.
void sum_next(Helpers &all, std::unique_lock<std::mutex> &guard) {
    Part *part = all.queue.front();
    all.queue.pop_front();
    guard.unlock();
    part->crc = crc32(0, part->data, part->size);
    guard.lock();
    part->done = true;
    all.finished.notify_all();
}

void *helper(void *) {
    pthread_setname_np(pthread_self(), "rgpu-sum");
    Helpers &all = all_helpers();
    std::unique_lock guard(all.lock);
    for (;;) {
        if (all.queue.empty()) all.work.wait(guard);
        else sum_next(all, guard);
    }
    return nullptr;
}

// How many there are now; they start with the first long payload. `lock` held.
unsigned helpers(Helpers &all) {
    if (all.started >= wanted_helpers()) return all.started;
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_BLOCK, &every, &before);
    while (all.started < wanted_helpers()) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, helper, nullptr)) break;
        pthread_detach(thread);
        ++all.started;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return all.started;
}
}  // namespace

uint32_t crc32_joined(uint32_t first, uint32_t second, uint64_t second_size) {
    for (size_t k = 0; second_size; ++k, second_size >>= 1)
        if (second_size & 1) first = times(kPowers[k], first);
    return first ^ second;
}

uint32_t crc32_long(uint32_t crc, const void *data, size_t size) {
    const auto *bytes = static_cast<const uint8_t *>(data);
    if (size < 2 * kShare || !wanted_helpers()) return crc32(crc, bytes, size);
    Helpers &all = all_helpers();
    std::unique_lock guard(all.lock);
    const size_t parts = std::min<size_t>(helpers(all) + 1, size / kShare);
    std::array<Part, kHelpers + 1> part{};
    const size_t each = size / parts;
    for (size_t i = 1; i < parts; ++i) {
        part[i] = {bytes + i * each, i + 1 == parts ? size - i * each : each, 0, false};
        all.queue.push_back(&part[i]);
    }
    all.work.notify_all();
    guard.unlock();
    crc = crc32(crc, bytes, parts > 1 ? each : size);
    guard.lock();
    for (size_t i = 1; i < parts; ++i) {
        while (!part[i].done) {
            if (all.queue.empty()) all.finished.wait(guard);
            else sum_next(all, guard);
        }
        crc = crc32_joined(crc, part[i].crc, part[i].size);
    }
    return crc;
}

}  // namespace rgpu
