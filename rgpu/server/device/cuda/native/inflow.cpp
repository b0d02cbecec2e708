// Copies to the device while their payload still arrives: it is never assembled first.
#include "engine.hpp"
#include "summing.hpp"

#include <algorithm>

namespace rgpu {

namespace {
constexpr size_t kDirect = 4096;  // a piece of a frame this long is copied to the device from where it is
constexpr uint64_t kPatience = 1'000'000'000;
}  // namespace

// True: the payload is awaited. False: there is none, and the call is applied.
bool Engine::open_inflow(const RecordView &view, Bad &bad) {
    const auto &header = view.header;
    Inflow in;
    in.call = header.call;
    in.seq = header.seq;
    in.left = in.total = header.payload_len;
    in.wanted = header.payload_crc;
    in.padding = wire::padded(in.left) - in.left;
    uint64_t stream_number = 0;
    if (header.call == wire::MemcpyH2d::id) {
        wire::MemcpyH2d call;
        if (!call.read(view.args, header.args_len)) {
            bad = Bad::arguments;
            return false;
        }
        in.destination = call.destination;
        in.pitch = in.width = in.total;
        in.height = 1;
        stream_number = call.stream;
    } else {
        wire::Memcpy2dH2d call;
        if (!call.read(view.args, header.args_len)) {
            bad = Bad::arguments;
            return false;
        }
        in.destination = call.destination;
        in.pitch = call.pitch;
        in.width = call.width;
        in.height = call.height;
        stream_number = call.stream;
        const unsigned __int128 size = static_cast<unsigned __int128>(call.width) * call.height;
        if (size != in.total) in.error = kInvalidValue;
    }
    in.stream = stream(stream_number);
    if (!in.stream) in.error = kInvalidHandle;
    else if (!in.error && !rectangle(in.destination, in.pitch, in.width, in.height)) in.error = kInvalidValue;
    inflow_ = in;
    inflow_.open = true;
    if (in.left) return true;
    if (in.wanted) bad = Bad::payload_checksum;
    else end_inflow();
    inflow_.open = false;
    return false;
}

// Takes payload and padding; returns how much was used.
size_t Engine::inflow(const uint8_t *data, size_t size, Frame *frame, bool &interrupted, Bad &bad) {
    Inflow &in = inflow_;
    size_t at = 0;
    while (in.left && at < size) {
        const size_t here = std::min<uint64_t>(in.left, size - at);
        size_t used = here;
        if (!in.skip && !in.error) {
            if (in.height == 1 && !in.filled && here >= kDirect && pinned(data + at, here)) {
                // Copied from where the program's side wrote it, which is kept until the call is complete. Its checksum
                // is not computed: nothing between that side and the device could damage it.
                in.error = put(data + at, here);
                in.sent += here;
                in.unsummed = true;
                in.left -= here;
                at += here;
                if (!in.error) {
                    std::lock_guard lock(mutex_);
                    mark_stream(*in.stream);
                }
                continue;
            }
            if (frame && in.height == 1 && !in.filled && here >= kDirect) {
                // DMA reads the frame while it is summed below; it is returned when the copy is complete.
                in.error = put(data + at, here);
                if (!in.error) hold(frame);
                in.sent += here;
            } else if (!stage(data + at, here, frame, interrupted, used)) {
                return at;
            }
        }
        in.crc = crc32_long(in.crc, data + at, used);
        in.left -= used;
        at += used;
    }
    if (in.left) return at;
    const size_t padding = std::min(in.padding, size - at);
    if (!all_zero(data + at, padding)) bad = Bad::padding;
    if (in.crc != in.wanted && !in.unsummed) bad = Bad::payload_checksum;
    if (bad != Bad::none) return at;
    in.padding -= padding;
    at += padding;
    if (in.padding) return at;
    if (!in.skip) end_inflow();
    in.open = false;
    return at;
}

// The work just submitted to the inflow's stream reads the frame, which is returned when that is complete.
void Engine::hold(Frame *frame) {
    std::lock_guard lock(mutex_);
    Stream &on = *inflow_.stream;
    staging_.hold(frame);
    on.actions.push_back({.kind = Action::frame, .tick = on.tick, .from = frame});
    activate(on);
    mark_stream(on);
}

// Copies a piece of the payload, perhaps in a frame, through a slot. False: interrupted before anything was used.
bool Engine::stage(const uint8_t *data, size_t size, Frame *frame, bool &interrupted, size_t &used) {
    Inflow &in = inflow_;
    if (!in.slot.data) {
        const uint64_t rest = in.total - in.sent;
        const int got = wait_until([&] { return staging_.take_slot(std::min<uint64_t>(rest, kPiece), in.slot); },
                                   now_ns() + kPatience, true);
        if (got < 0) {
            interrupted = true;
            return false;
        }
        if (got == 0 && in.height == 1) {
            // The work that fills the ring may wait for a call behind this one: then the driver stages the data, except
            // pinned memory, which it reads in place.
            in.error = put(data, size);
            if (frame && !in.error) hold(frame);
            in.sent += size;
            used = size;
            return true;
        }
        if (got == 0) {
            interrupted = interrupts_.load() > 0;
            if (interrupted) return false;
            used = 0;
            return true;  // to be tried again
        }
        in.filled = 0;
        // Whole rows, or one row in parts.
        if (in.height == 1) in.capacity = std::min<uint64_t>(rest, in.slot.size);
        else if (in.width <= in.slot.size) in.capacity = std::min<uint64_t>(rest, in.slot.size / in.width * in.width);
        else in.capacity = std::min<uint64_t>(in.width - in.sent % in.width, in.slot.size);
    }
    used = std::min(size, in.capacity - in.filled);
    std::memcpy(in.slot.data + in.filled, data, used);
    in.filled += used;
    if (in.filled == in.capacity) submit_slot();
    return true;
}

void Engine::submit_slot() {
    Inflow &in = inflow_;
    in.error = put(in.slot.data, in.filled);
    in.sent += in.filled;
    std::lock_guard lock(mutex_);
    if (in.error) {
        staging_.give_slot(in.slot);
    } else {
        in.stream->actions.push_back({.kind = Action::slot, .tick = in.stream->tick, .staged = in.slot});
        activate(*in.stream);
        if (in.filled >= kSlotSizes[1]) mark_stream(*in.stream);
    }
    in.slot = Slot{};
    in.filled = 0;
}

// Copies `size` bytes of the payload, from in.sent on, to the device.
CUresult Engine::put(const void *from, size_t size) {
    Inflow &in = inflow_;
    CUresult result;
    use(in.stream->context);
    if (in.height == 1) {
        result = driver_.copy_in(in.destination + in.sent, from, size, in.stream->handle);
    } else {
        const uint64_t row = in.sent / in.width, column = in.sent % in.width;
        const CUdeviceptr to = in.destination + row * in.pitch + column;
        if (size < in.width) {
            result = driver_.copy_in(to, from, size, in.stream->handle);
        } else {
            Copy2D copy{};
            copy.src_type = kMemoryHost;
            copy.src_host = from;
            copy.src_pitch = copy.width = in.width;
            copy.dst_type = kMemoryDevice;
            copy.dst_device = to;
            copy.dst_pitch = in.pitch;
            copy.height = size / in.width;
            result = driver_.copy_2d(&copy, in.stream->handle);
        }
    }
    return keep(*in.stream, result, 0);
}

void Engine::end_inflow() {
    Inflow &in = inflow_;
    if (in.error) {
        if (in.slot.data) {
            std::lock_guard lock(mutex_);
            staging_.give_slot(in.slot);
            in.slot = Slot{};
        }
        if (direct_) direct_result_ = in.error;
        else argument_error(in.call, in.seq, in.error);
    } else {
        std::lock_guard lock(mutex_);
        submit(*in.stream, in.seq);
    }
    if (!direct_) applied_.store(in.seq, std::memory_order_release);
}

}  // namespace rgpu
