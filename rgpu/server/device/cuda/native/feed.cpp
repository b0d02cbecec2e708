// The record stream: hot calls are applied here, other records are handed over whole.
#include "crc32.hpp"
#include "engine.hpp"

#include <algorithm>

namespace rgpu {

using wire::padded;
using wire::RecordHeader;

bool Engine::streams_payload(uint16_t call) const {
    return !pass_all_ && (call == wire::MemcpyH2d::id || call == wire::Memcpy2dH2d::id);
}

// Examines the record at `data`; `need` > `have` when more of it must arrive first.
Bad Engine::examine(const uint8_t *data, size_t have, RecordView &view, size_t &need) {
    RecordHeader &header = view.header;
    need = sizeof header;
    if (have < need) return Bad::none;
    std::memcpy(&header, data, sizeof header);
    if (Bad bad = check_header(header); bad != Bad::none) return bad;
    need = sizeof header + header.args_len;
    if (have < need) return Bad::none;
    view.args = data + sizeof header;
    if (crc32(crc32(0, data, wire::kCrcCovered), view.args, header.args_len) != header.crc) return Bad::checksum;
    if (header.seq > applied() + 1) return Bad::gap;
    const size_t head = sizeof header + padded(header.args_len);
    need = head;
    if (have < need) return Bad::none;
    if (!all_zero(view.args + header.args_len, head - sizeof header - header.args_len)) return Bad::padding;
    if (streams_payload(header.call)) return Bad::none;
    need = head + padded(header.payload_len);
    if (have < need) return Bad::none;
    view.payload = data + head;
    if (header.payload_len ? crc32(0, view.payload, header.payload_len) != header.payload_crc : header.payload_crc != 0)
        return Bad::payload_checksum;
    return all_zero(view.payload + header.payload_len, need - head - header.payload_len) ? Bad::none : Bad::padding;
}

void Engine::hand_over(const RecordView &view, Step &step) {
    const RecordHeader &header = view.header;
    step.seq = header.seq;
    step.call = header.call;
    step.flags = header.flags;
    step.thread = header.thread;
    step.args = view.args;
    step.args_len = header.args_len;
    step.payload = view.payload;
    step.payload_len = header.payload_len;
}

Outcome Engine::apply_hot(const RecordView &view, Bad &bad) {
    if (streams_payload(view.header.call)) {
        if (const Pace pace = keep_pace(); pace != Pace::on)
            return pace == Pace::ahead ? Outcome::ahead : Outcome::interrupted;
        return open_inflow(view, bad) ? Outcome::opened : Outcome::applied;
    }
    if (view.header.call == wire::Completed::id) {
        wire::Completed call;
        if (!call.read(view.args, view.header.args_len)) {
            bad = Bad::arguments;
            return Outcome::applied;
        }
        // Live this returns at once: the program has read the completion from the watermark. A replay waits, or puts
        // it off.
        if (put_off(call.observed)) return Outcome::applied;
        const int got = wait_until([&] { return complete_locked(call.observed); }, ~0ull, true);
        if (got < 0) return Outcome::interrupted;
        std::lock_guard lock(mutex_);
        observed(call.observed);
        return Outcome::applied;
    }
    if (const Pace pace = keep_pace(); pace != Pace::on)
        return pace == Pace::ahead ? Outcome::ahead : Outcome::interrupted;
    bool decoded = true;
    const CUresult result = call(view, false, decoded);
    if (!decoded) bad = Bad::arguments;
    if (bad != Bad::none || result == kSuccess) return Outcome::applied;
    // Python makes the holders of releasable memory free it, and tries again.
    if (result == kOutOfMemory && !wire::awaited(view.header.call)) return Outcome::handed;
    if (wire::awaited(view.header.call)) answer_now(view.header.seq, result, false);
    else argument_error(view.header.call, view.header.seq, result);
    return Outcome::applied;
}

Came Engine::process(const RecordView &view, Step &step, Bad &bad) {
    const RecordHeader &header = view.header;
    if (header.seq <= applied()) {  // it was applied before
        if (streams_payload(header.call)) {
            inflow_ = Inflow{};
            inflow_.open = inflow_.skip = true;
            inflow_.left = header.payload_len;
            inflow_.wanted = header.payload_crc;
            inflow_.padding = padded(header.payload_len) - header.payload_len;
            inflow_.seq = 0;
        }
        return Came::all;
    }
    if (!put_off_.empty() && !ordered_.load(std::memory_order_acquire) && settle(~0ull, true) < 0)
        return Came::interrupted;
    begun_->store(header.seq, std::memory_order_relaxed);
    RecordView inner;
    const bool timed = timed_here(view, inner);
    const RecordView &work = timed ? inner : view;
    bool own = (wire::hot(header.call) && !pass_all_) || timed;
    if (header.call == wire::Completed::id) {
        wire::Completed call;
        if (!call.read(view.args, header.args_len)) {
            bad = Bad::arguments;
            return Came::corrupt;
        }
        if (!call.observed || call.observed >= header.seq) {
            bad = Bad::observation;
            return Came::corrupt;
        }
        if (foreign_.erase(call.observed)) own = false;
    }
    if (!own) {
        if (wire::awaited(header.call)) foreign_.insert(header.seq);
        hand_over(view, step);
        return Came::record;
    }
    if (ordered_.load(std::memory_order_acquire)) {
        if (uint64_t to; work_of(work, to)) {
            // With a host function open, the caller first looks for its end in the backlog.
            const int turn = in_order(to, host_functions_.load(std::memory_order_relaxed) ? 0 : kTurn);
            if (turn < 0) return Came::interrupted;
            if (!turn) {
                hand_over(view, step);
                step.stream = to;
                return Came::waiting;
            }
        }
    } else if (uint64_t to; behind(work, to)) {
        hand_over(view, step);
        step.stream = to;
        return Came::behind;
    } else if (!stay_close(work)) {
        return Came::interrupted;
    }
    switch (timed ? apply_timed(inner, bad) : apply_hot(view, bad)) {
        case Outcome::interrupted: return Came::interrupted;
        case Outcome::opened: return Came::all;
        case Outcome::ahead:
            hand_over(view, step);
            return Came::ahead;
        case Outcome::handed:
            if (timed) foreign_.insert(header.seq);  // else no awaited call
            hand_over(view, step);
            return Came::record;
        case Outcome::applied: break;
    }
    if (bad != Bad::none) return Came::corrupt;
    applied_.store(header.seq, std::memory_order_release);
    return Came::all;
}

bool Engine::prompt(const uint8_t *data, size_t size, const uint8_t *payload, size_t payload_size) {
    if (!gathered_.empty() || pass_all_ || ordered_.load(std::memory_order_acquire) || interrupted()) return false;
    if (!put_off_.empty()) return false;
    if (payload_size && (!size || inflow_.open)) return false;
    size_t at = 0, slots = 0;  // slots: to be taken from the ring
    uint64_t next = applied() + 1;
    if (inflow_.open) {
        if (inflow_.skip || inflow_.height != 1) return false;
        const uint64_t left = inflow_.left + inflow_.padding;
        at = std::min<uint64_t>(left, size);
        slots += !inflow_.slot.data;
        next = inflow_.seq + 1;
    }
    size_t count = 0;
    for (; at < size; ++count) {
        RecordHeader header;
        if (size - at < sizeof header) return false;
        std::memcpy(&header, data + at, sizeof header);
        const size_t whole = sizeof header + padded(header.args_len);
        if (header.magic != wire::kRecordMagic || header.args_len > size || whole > size - at ||
            header.seq != next + count || !wire::hot(header.call))
            return false;
        const bool elsewhere = payload_size && whole == size - at;
        if (elsewhere && (header.call != wire::MemcpyH2d::id || header.payload_len != payload_size ||
                          payload_size % 8 || !pinned(payload, payload_size)))
            return false;
        if (header.payload_len && !elsewhere) {
            if (header.call != wire::MemcpyH2d::id || header.payload_len > kSlotSizes[2]) return false;
            ++slots;
        }
        if (header.call == wire::Completed::id) {
            wire::Completed call;
            if (!call.read(data + at + sizeof header, header.args_len) || call.observed > applied() ||
                foreign_.count(call.observed))
                return false;
            std::lock_guard lock(mutex_);
            if (!complete_locked(call.observed) && !(collect() && complete_locked(call.observed))) return false;
        }
        at += whole;
        if (!elsewhere) at = std::min<uint64_t>(size, at + padded(header.payload_len));
    }
    return room_for(slots) && pending_ + count <= std::min(ahead_, kFew);
}

// Whether the ring has so many long slots.
bool Engine::room_for(size_t slots) {
    if (!slots) return true;
    std::lock_guard lock(mutex_);
    return staging_.long_slots() >= slots || (collect() && staging_.long_slots() >= slots);
}

void Engine::feed(const uint8_t *data, size_t size, Step &step) {
    use();
    size_t at = 0;
    Came came = Came::all;
    Bad bad = Bad::none;
    if (gathered_done_) {
        gathered_.clear();
        if (gathered_.capacity() > (8u << 20)) gathered_.shrink_to_fit();
        gathered_done_ = false;
    }
    Frame *frame = staging_.frame_of(data);
    while (came == Came::all) {
        if (inflow_.open) {
            bool interrupted = false;
            const size_t used = inflow(data + at, size - at, frame, interrupted, bad);
            at += used;
            offset_ += used;
            if (bad != Bad::none) came = Came::corrupt;
            else if (interrupted) came = Came::interrupted;
            else if (inflow_.open) break;
            continue;
        }
        if (interrupts_.load(std::memory_order_acquire)) {
            came = Came::interrupted;
            break;
        }
        RecordView view;
        size_t need = 0;
        if (gathered_.empty()) {
            if (at == size) break;
            bad = examine(data + at, size - at, view, need);
            if (bad == Bad::none && need > size - at) {
                gathered_.assign(data + at, data + size);
                at = size;
                break;
            }
            if (bad == Bad::none) came = process(view, step, bad);
            if (bad != Bad::none) came = Came::corrupt;
            if (came == Came::all || came == Came::record) {
                at += need;
                offset_ += need;
            }
            continue;
        }
        bad = examine(gathered_.data(), gathered_.size(), view, need);
        if (bad == Bad::none && need > gathered_.size()) {
            const size_t more = std::min(need - gathered_.size(), size - at);
            if (!more) break;
            gathered_.insert(gathered_.end(), data + at, data + at + more);
            at += more;
            continue;
        }
        if (bad == Bad::none) came = process(view, step, bad);
        if (bad != Bad::none) came = Came::corrupt;
        if (came == Came::all) gathered_.clear();
        if (came == Came::record) gathered_done_ = true;
        if (came == Came::all || came == Came::record) offset_ += need;
    }
    if (came == Came::waiting || came == Came::ahead)  // the whole record is fed again, unless parts were taken before
        step.payload_len = !gathered_.empty() && streams_payload(step.call) ? padded(step.payload_len) : 0;
    step.came = static_cast<int>(came);
    step.bad = static_cast<int>(bad);
    step.taken = at;
    step.waited = waited_ns_;
    step.applied = applied();
    step.offset = offset_;
    std::lock_guard lock(mutex_);
    step.awaiting = static_cast<uint32_t>(awaiting_ + queue_.size());
    step.bugs = bugs_;
    step.bug_seq = bug_seq_;
    step.bug_result = bug_result_;
    step.bug_call = bug_call_;
}

void Engine::passed(uint64_t seq) { applied_.store(seq, std::memory_order_release); }

void Engine::position(uint64_t applied) {
    reset();
    {
        std::lock_guard lock(mutex_);  // answers made before the rebuild are not needed any more
        while (!retained_.empty()) forget_answer(retained_.begin()->first);
        foreign_.clear();
        put_off_.clear();
        beside_ = 0;
        passed_ = {kNoStream, 0};
    }
    applied_.store(applied, std::memory_order_release);
}

void Engine::reset() {
    std::lock_guard lock(mutex_);
    gathered_.clear();
    gathered_done_ = false;
    if (inflow_.slot.data) staging_.give_slot(inflow_.slot);
    inflow_ = Inflow{};
    offset_ = 0;
}

void Engine::set_foreign(const uint64_t *seqs, size_t count) { foreign_.insert(seqs, seqs + count); }

void Engine::interrupt(bool on) {
    interrupts_.fetch_add(on ? 1 : -1, std::memory_order_acq_rel);
}

}  // namespace rgpu
