// A backlog takes effect in the order in which it was issued (SEMANTICS 20): where work goes to another stream than
// before, what was given before is waited for, on the host. Who decides when: rgpu/server/worker/apply/ordering.py.
#include "engine.hpp"

#include <algorithm>

namespace rgpu {

namespace {
constexpr uint32_t kSurplus = 32;  // calls beyond the usual ones; markers alone make for so many of a stream
constexpr uint32_t kLeast = 8;     // the same where the device works so long at each that few are under way
constexpr double kMarked = 100e6;  // ns of work behind which a marker stands, so that progress shows
}  // namespace

void Engine::order(bool on) {
    work_stream_.store(kNoStream, std::memory_order_release);
    ordered_.store(on, std::memory_order_release);
}

bool Engine::work_of(const RecordView &view, uint64_t &stream) {
    const auto take = [&](auto call) {
        if (!call.read(view.args, view.header.args_len)) return false;
        stream = call.stream;
        return true;
    };
    switch (view.header.call) {
        case wire::Launch::id: return take(wire::Launch{});
        case wire::GraphLaunch::id: return take(wire::GraphLaunch{});
        case wire::Memset::id: return take(wire::Memset{});
        case wire::MemcpyH2d::id: return take(wire::MemcpyH2d{});
        case wire::MemcpyD2h::id: return take(wire::MemcpyD2h{});
        case wire::MemcpyD2d::id: return take(wire::MemcpyD2d{});
        case wire::Memcpy2dH2d::id: return take(wire::Memcpy2dH2d{});
        case wire::Memcpy2dD2h::id: return take(wire::Memcpy2dD2h{});
        case wire::Memcpy2dD2d::id: return take(wire::Memcpy2dD2d{});
        case wire::EventRecord::id: return take(wire::EventRecord{});
        case wire::StreamWaitEvent::id: return take(wire::StreamWaitEvent{});
        default: return false;  // it waits for work, or gives none
    }
}

int Engine::in_order(uint64_t stream, uint64_t patience_ns) {
    if (work_stream_.load(std::memory_order_acquire) == stream) return 1;
    use();
    uint64_t seen;
    {
        std::lock_guard lock(mutex_);
        for (Stream *active : active_) mark_stream(*active);
        seen = reached_;
    }
    for (;;) {
        bool over = false;
        const int got = wait_until([&] { return (over = active_.empty()) || reached_ != seen; },
                                   now_ns() + patience_ns, true);
        if (got <= 0) return got;
        if (over) break;
        std::lock_guard lock(mutex_);
        seen = reached_;
    }
    pass_order(stream);
    return 1;
}

bool Engine::behind(const RecordView &view, uint64_t &stream) {
    const uint32_t usual = usual_.load(std::memory_order_relaxed);
    if (usual == UINT32_MAX) return false;
    const size_t limit = std::min<size_t>(size_t{usual} + kSurplus, std::max<size_t>(usual + kLeast, ahead_ / 2));
    if (pending_.load(std::memory_order_relaxed) <= limit || !work_of(view, stream)) return false;
    std::lock_guard lock(mutex_);
    collect();
    return pending_ > limit && std::any_of(active_.begin(), active_.end(), [&](const Stream *active) {
        return active->number != stream && !active->pending.empty();
    });
}

int Engine::mark_every() const {
    if (!ordered_.load(std::memory_order_relaxed)) return kMarkEvery;
    return call_ns_ > 0 ? static_cast<int>(std::clamp(kMarked / call_ns_, 1.0, double(kMarkEvery))) : 1;
}

uint64_t Engine::reached() {
    std::lock_guard lock(mutex_);
    collect();
    return reached_;
}

uint32_t Engine::ahead() {
    std::lock_guard lock(mutex_);
    const size_t pending = pending_;
    return pending >= ahead_ / 2 ? UINT32_MAX : static_cast<uint32_t>(pending);
}

}  // namespace rgpu
