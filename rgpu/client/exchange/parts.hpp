// A run in a thread of its own, in parts: while it goes on, the Python side keeps the books of the part before.
//
// Two Givens take turns. The run's thread owns the current one; it hands it over where the other has been given back,
// and continues there. So at most one part is behind, and a Given is touched by one side at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace rgpu {

class Exchange;
struct Given;

class Parts {
   public:
    explicit Parts(Exchange &exchange) : exchange_(exchange) {}
    ~Parts();
    Parts(const Parts &) = delete;
    Parts &operator=(const Parts &) = delete;

    // -- the Python side's --
    bool start(Given *first, Given *second);  // begins a run; false: there is no thread for it
    // Waits for a part whose books are to be kept: 0 or 1, which of both it is, and kLast where the run has ended with
    // it.
    static constexpr int kLast = 2;
    int take();
    void give_back();  // the books of the part that was taken are kept
    void stop() { stop_.store(true, std::memory_order_relaxed); }  // the run is to end soon

    // -- the run's --
    Given *hand_over(Given &current);  // what to go on with; null: the other part's books are not kept yet
    uint64_t handed() const { return handed_.load(std::memory_order_relaxed); }      // parts handed over
    uint64_t returned() const { return returned_.load(std::memory_order_acquire); }  // of these, those with books kept
    bool stopping() const { return stop_.load(std::memory_order_relaxed); }

   private:
    enum Job : uint32_t { kNone, kRun, kQuit };
    void work();
    void tell();  // wakes take()

    Exchange &exchange_;
    std::thread thread_;
    Given *both_[2] = {};
    std::atomic<uint32_t> job_{kNone}, news_{0};
    std::atomic<uint64_t> handed_{0}, returned_{0};
    std::atomic<bool> ended_{false}, stop_{false};
};

}  // namespace rgpu
