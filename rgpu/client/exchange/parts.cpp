#include "parts.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <system_error>

#include "exchange.hpp"

namespace rgpu {
namespace {

constexpr int64_t kSpin = 60'000;  // ns without sleeping: a wake-up costs as much as the books of a few calls

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Polls for a while. Returns whether the condition holds.
template <class Condition>
bool polled(Condition condition) {
    for (const int64_t until = now_ns() + kSpin; !condition(); sched_yield())
        if (now_ns() > until) return false;
    return true;
}

}  // namespace

Parts::~Parts() {
    if (!thread_.joinable()) return;
    job_.store(kQuit, std::memory_order_release);
    job_.notify_one();
    thread_.join();
}

bool Parts::start(Given *first, Given *second) {
    both_[0] = first;
    both_[1] = second;
    handed_.store(0, std::memory_order_relaxed);
    returned_.store(0, std::memory_order_relaxed);
    ended_.store(false, std::memory_order_relaxed);
    stop_.store(false, std::memory_order_relaxed);
    if (!thread_.joinable()) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before);  // signals are handled by the interpreter's threads
        try {
            thread_ = std::thread([this] { work(); });
        } catch (const std::system_error &) {
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (!thread_.joinable()) return false;
        pthread_setname_np(thread_.native_handle(), "rgpu-exchange");
    }
    job_.store(kRun, std::memory_order_release);
    job_.notify_one();
    return true;
}

void Parts::work() {
    for (;;) {
        if (!polled([this] { return job_.load(std::memory_order_acquire) != kNone; }))
            job_.wait(kNone, std::memory_order_acquire);
        const uint32_t job = job_.load(std::memory_order_acquire);
        if (job == kQuit) return;
        if (job != kRun) continue;
        exchange_.run(*both_[0], this);
        uint32_t expected = kRun;  // unless it is to end
        job_.compare_exchange_strong(expected, kNone);
        ended_.store(true, std::memory_order_release);
        tell();
    }
}

int Parts::take() {
    for (;;) {
        const uint32_t news = news_.load(std::memory_order_acquire);
        const bool ended = ended_.load(std::memory_order_acquire);  // read ahead of what was handed over until then
        const uint64_t handed = handed_.load(std::memory_order_acquire), returned = returned_.load(std::memory_order_relaxed);
        if (handed > returned) return static_cast<int>(returned % 2);
        if (ended) return static_cast<int>(handed % 2) | kLast;
        if (!polled([&] { return news_.load(std::memory_order_acquire) != news; }))
            news_.wait(news, std::memory_order_acquire);
    }
}

void Parts::give_back() { returned_.fetch_add(1, std::memory_order_release); }

Given *Parts::hand_over(Given &current) {
    const uint64_t handed = handed_.load(std::memory_order_relaxed);
    if (returned_.load(std::memory_order_acquire) < handed) return nullptr;
    Given &next = *both_[(handed + 1) % 2];
    next = current;
    next.clear();
    handed_.store(handed + 1, std::memory_order_release);
    tell();
    return &next;
}

void Parts::tell() {
    news_.fetch_add(1, std::memory_order_release);
    news_.notify_one();
}

}  // namespace rgpu
