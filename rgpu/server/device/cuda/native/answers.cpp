// Answers: expected, received piece by piece, kept until the program's side reports that it has them.
#include "engine.hpp"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <chrono>

namespace rgpu {

namespace {
constexpr uint64_t kWatermarkInterval = 500'000;  // ns between two watermarks that no answer requires
}

// The caller holds the mutex, and a reference that it drops.
Answer *Engine::expect(uint64_t seq, bool callback, bool timed) {
    auto *answer = new Answer;
    answer->seq = seq;
    answer->callback = callback;
    answer->references = 1;
    if (callback) return answer;
    if (!timed) {
        ++awaiting_;
        awaited_since_ = now_ns();
    }
    answer->timed = timed;
    forget_answer(seq);  // a replay's answer replaces the one before
    answer->retained = true;
    retained_[seq] = answer;
    return answer;
}

void Engine::drop(Answer *answer) {
    if (--answer->references > 0 || answer->retained) return;
    staging_.give_buffer(answer->buffer);
    delete answer;
}

// The program knows that the call is complete. Called with the mutex, by the applying thread. The program may know so
// from a watermark, before a timed call's times are there: its answer is still to be sent, for a profiler waits for it.
void Engine::observed(uint64_t seq) {
    const auto found = retained_.find(seq);
    if (found != retained_.end() && found->second->timed && !found->second->done) found->second->early = true;
    else forget_answer(seq);
}

// The caller holds the mutex.
void Engine::forget_answer(uint64_t seq) {
    auto found = retained_.find(seq);
    if (found == retained_.end()) return;
    Answer *answer = found->second;
    retained_.erase(found);
    answer->retained = false;
    ++answer->references;
    drop(answer);
}

void Engine::queue_piece(Answer *answer, uint32_t index) {
    if (!attached_) return;
    ++answer->references;
    queue_.emplace_back(answer, index);
    if (!here_) out_.notify_one();
}

// All of its waits are over, or it failed.
void Engine::finish(Answer *answer, CUresult result) {
    answer->result = error() ? error() : result;
    answer->done = true;
    if (answer->timed) {
        if (answer->retained) queue_times(answer);
        if (answer->retained && answer->early) forget_answer(answer->seq);
        return;
    }
    if (answer->result) answer->pieces.clear();
    if (answer->callback) {
        ++answer->references;
        callbacks_.push_back(answer);
        callback_.notify_one();
        return;
    }
    --awaiting_;
    if (answer->pieces.empty()) queue_piece(answer, 0);
}

void Engine::act(Action &action, CUresult result) {
    Answer *answer = action.answer;
    switch (action.kind) {
        case Action::slot: staging_.give_slot(action.staged); return;
        case Action::frame: staging_.give_frame(action.from); return;
        case Action::time:
            action.timed->complete = now_ns();
            ended_.push_back(action.timed);
            if (ended_.size() == 1) times_.notify_one();
            return;
        case Action::wait:
            if (--answer->waits == 0) finish(answer, result);
            break;
        case Action::piece:
            if (answer->done) break;
            if ((result || error()) && !answer->arrived) {
                finish(answer, result);
                break;
            }
            // The beginning was sent with the result 0: the error reaches the program in the watermark.
            if (result || error()) std::memset(answer->piece(action.index), 0, answer->pieces[action.index]);
            ++answer->arrived;
            if (!answer->callback) queue_piece(answer, action.index);
            if (answer->arrived == answer->pieces.size()) {
                answer->done = true;
                if (answer->callback) {
                    ++answer->references;
                    callbacks_.push_back(answer);
                    callback_.notify_one();
                } else {
                    --awaiting_;
                }
            }
            break;
    }
    drop(answer);
}

void Engine::answer_now(uint64_t seq, CUresult result, bool callback) {
    std::lock_guard lock(mutex_);
    Answer *answer = expect(seq, callback);
    finish(answer, result);
    drop(answer);
}

void Engine::attach() {
    std::lock_guard lock(mutex_);
    forget_queue();
    attached_ = true;
    woken_ = false;
    for (auto &[seq, answer] : retained_) {
        if (answer->timed) {
            if (answer->done) queue_times(answer);
            continue;
        }
        if (answer->done && answer->pieces.empty()) queue_piece(answer, 0);
        for (uint32_t index = 0; index < answer->arrived && index < answer->pieces.size(); ++index)
            queue_piece(answer, index);
    }
}

void Engine::detach() {
    std::lock_guard lock(mutex_);
    attached_ = false;
    forget_queue();
}

void Engine::forget_queue() {
    auto old = std::move(queue_);
    queue_.clear();
    for (auto &[answer, index] : old) drop(answer);
    for (Answer *answer : std::exchange(times_queue_, {})) drop(answer);
    if (leaving_now_) drop(std::exchange(leaving_now_, nullptr));
    leaving_here_ = false;
}

void Engine::fill(Out &out, Answer *answer, uint32_t index) {
    out.took = static_cast<int>(Took::answer);
    out.result = answer->result;
    out.seq = answer->seq;
    out.answer = answer;
    out.index = index;
    out.data = answer->pieces.empty() ? nullptr : answer->piece(index);
    out.size = answer->pieces.empty() ? 0 : answer->pieces[index];
    out.more = index + 1 < answer->pieces.size();
}

// Between the first and the last piece of an answer no piece of another is taken: several copies may be under way in
// several streams, and only the first piece of an answer identifies it to the receiver. All pieces of a copy were
// submitted to the device in a row, so the rest arrives in any case.
bool Engine::pop(Out &out) {
    auto next = queue_.begin();
    if (leaving_now_)
        next = std::find_if(next, queue_.end(), [&](const auto &piece) { return piece.first == leaving_now_; });
    if (next == queue_.end()) return false;
    const auto [answer, index] = *next;
    queue_.erase(next);
    fill(out, answer, index);  // the queue's reference passes to the taker
    if (out.more && !leaving_now_) {
        ++answer->references;
        leaving_now_ = answer;
    } else if (!out.more && leaving_now_) {
        drop(std::exchange(leaving_now_, nullptr));
    }
    return true;
}

void Engine::take(Out &out, uint64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    const uint64_t deadline = now_ns() + timeout_ns;
    out = Out{};
    for (;;) {
        if (woken_ || stopped_) {
            woken_ = false;
            out.took = static_cast<int>(Took::woken);
            return;
        }
        // What the applying thread waits for, or has begun to take, is its own.
        if (!here_ && !leaving_here_ && pop(out)) return;
        if (!times_queue_.empty() && !leaving_now_) {
            out.took = static_cast<int>(Took::times);
            return;
        }
        const uint64_t now = now_ns();
        const uint64_t due = last_watermark_ + kWatermarkInterval;
        // The last watermark may have been made after a call's completion but before it counted as applied: then no
        // completion will request another one.
        const bool behind = !progress_ && last_done_ < applied() && idle_locked();
        if ((progress_ || behind) && now >= due) {
            progress_ = false;
            out.took = static_cast<int>(Took::progress);
            return;
        }
        if (now >= deadline) return;
        const uint64_t until = progress_ || behind ? std::min(due, deadline) : deadline;
        out_.wait_for(lock, std::chrono::nanoseconds(until - now));
    }
}

// Whether the oldest answer can be taken by the applying thread: of several pieces only where that is wanted, they are
// few, and all of them are there.
bool Engine::may_take_here(bool several) const {
    if (leaving_now_) return leaving_here_;
    if (queue_.empty()) return false;
    const Answer &answer = *queue_.front().first;
    return answer.pieces.size() <= 1 || (several && few_pieces(answer) && answer.arrived == answer.pieces.size());
}

// A MiB in all, at most.
bool Engine::few_pieces(const Answer &answer) {
    return answer.pieces.size() <= kFewPieces && answer.longest <= kShortPiece;
}

void Engine::take_here(Out &out, uint64_t spin_ns, int fd, bool several) {
    use();
    out = Out{};
    const uint64_t end = now_ns() + spin_ns;
    std::unique_lock lock(mutex_);
    here_ = true;
    for (unsigned turn = 1;; ++turn) {
        collect();
        if (may_take_here(several) && pop(out)) {
            leaving_here_ = out.more;
            break;
        }
        const bool arriving = several && !queue_.empty() && few_pieces(*queue_.front().first);
        if ((!awaiting_ && !arriving) || (!queue_.empty() && !arriving) || interrupts_.load() || stopped_) break;
        lock.unlock();
        pollfd readable{fd, POLLIN, 0};
        const bool more = turn % 4 == 0 && fd >= 0 && ::poll(&readable, 1, 0) > 0;
        if (!more) sched_yield();
        lock.lock();
        if (more || now_ns() > end) break;
    }
    here_ = false;
    if (awaiting_) busy_.notify_one();
    if (!queue_.empty() || progress_) out_.notify_one();
}

bool Engine::look(uint64_t spin_ns, int fd) {
    const uint64_t end = now_ns() + spin_ns;
    pollfd readable{fd, POLLIN, 0};
    do {
        if (::poll(&readable, 1, 0) != 0) return true;
        sched_yield();
    } while (now_ns() < end);
    return false;
}

void Engine::take_callback(Out &out, uint64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    out = Out{};
    callback_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return stopped_ || !callbacks_.empty(); });
    if (stopped_) {
        out.took = static_cast<int>(Took::woken);
        return;
    }
    if (callbacks_.empty()) return;
    fill(out, callbacks_.front(), 0);  // stays in the list until it is released: a drain waits for that
}

void Engine::release(Answer *answer) {
    std::lock_guard lock(mutex_);
    if (answer->callback && !callbacks_.empty() && callbacks_.front() == answer) callbacks_.pop_front();
    drop(answer);
}

void Engine::wake() {
    std::lock_guard lock(mutex_);
    woken_ = true;
    out_.notify_all();
}

void Engine::stop() {
    {
        std::lock_guard lock(mutex_);
        stopped_ = true;
    }
    out_.notify_all();
    callback_.notify_all();
    busy_.notify_all();
    times_.notify_all();
    if (poller_.joinable()) poller_.join();
    if (timer_.joinable()) timer_.join();
}

size_t Engine::retained(uint64_t *seqs, size_t size) {
    std::lock_guard lock(mutex_);
    size_t count = 0;
    for (const auto &[seq, answer] : retained_)
        if (answer->done && count < size) seqs[count++] = seq;
    return count;
}

Answer *Engine::retained_answer(uint64_t seq) {
    std::lock_guard lock(mutex_);
    auto found = retained_.find(seq);
    if (found == retained_.end()) return nullptr;
    ++found->second->references;
    return found->second;
}

uint8_t *Engine::take_frame() {
    std::lock_guard lock(mutex_);
    Frame *frame = staging_.take_frame();
    return frame ? frame->data : nullptr;
}

void Engine::give_frame(uint8_t *data) {
    std::lock_guard lock(mutex_);
    if (Frame *frame = staging_.frame_of(data)) staging_.give_frame(frame);
}

}  // namespace rgpu
