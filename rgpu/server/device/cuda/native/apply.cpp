// The hot calls, as driver calls.
#include "engine.hpp"

#include <algorithm>

namespace rgpu {

Stream *Engine::stream(uint64_t number) {
    auto found = streams_.find(number);
    if (found == streams_.end()) return nullptr;
    use(found->second->context);  // the calls that follow are made in it
    return found->second.get();
}

void Engine::argument_error(uint16_t call, uint64_t seq, CUresult result) {
    ++bugs_;
    bug_call_ = call;
    bug_seq_ = seq;
    bug_result_ = result;
}

// Whether the rows lie in one valid range; sizes that do not fit 64 bits are in none.
bool Engine::rectangle(CUdeviceptr address, uint64_t pitch, uint64_t width, uint64_t height) {
    if (!height || !width) return true;
    if (height > 1 && pitch < width) return false;
    const unsigned __int128 size = static_cast<unsigned __int128>(pitch) * (height - 1) + width;
    return size <= ~uint64_t{0} && contains(address, static_cast<uint64_t>(size));
}

namespace {
struct Counted {  // counted once when it is made, once when it ends
    std::atomic<uint64_t> *number;
    explicit Counted(std::atomic<uint64_t> *number) : number(number) {
        if (number) number->fetch_add(1);
    }
    ~Counted() {
        if (number) number->fetch_add(1);
    }
    Counted(const Counted &) = delete;
};
}  // namespace

CUresult Engine::launch(const wire::Launch &call, uint64_t seq) {
    auto module = modules_.find(call.module);
    if (module == modules_.end() || call.function >= module->second.size()) return kInvalidHandle;
    const Function &function = module->second[call.function];
    Stream *on = stream(call.stream);
    if (!on) return kInvalidHandle;
    if (call.parameters.size < function.parameters || call.attributes.size % sizeof(LaunchAttribute)) return kInvalidValue;
    const Counted counted(function.traits & kPrints ? &printing_launches_ : nullptr);
    if (function.traits & kAllocates) allocated_.store(true, std::memory_order_release);
    on->giving = {seq, call.module, call.function};
    size_t size = call.parameters.size;
    void *extra[] = {reinterpret_cast<void *>(1), const_cast<void *>(call.parameters.data),  // buffer pointer
                     reinterpret_cast<void *>(2), &size,                                     // buffer size
                     nullptr};
    if (!call.attributes.size && !(call.flags & 1))
        return keep(*on, timing(on->handle, [&] {
            return driver_.launch(function.handle, call.grid_x, call.grid_y, call.grid_z, call.block_x, call.block_y,
                                  call.block_z, call.shared, on->handle, nullptr, extra);
        }), seq);
    std::vector<LaunchAttribute> attributes(call.attributes.size / sizeof(LaunchAttribute));
    if (!attributes.empty()) std::memcpy(attributes.data(), call.attributes.data, call.attributes.size);
    for (LaunchAttribute &attribute : attributes) {
        if (attribute.id == kAttributeDeviceUpdatableNode) return kNotSupported;
        if (attribute.id != kAttributeProgrammaticEvent && attribute.id != kAttributeLaunchCompletionEvent) continue;
        uint64_t number;
        std::memcpy(&number, attribute.value, sizeof number);  // on the wire the client's number replaces the handle
        auto event = events_.find(number);
        if (event == events_.end()) return kInvalidHandle;
        std::memcpy(attribute.value, &event->second.handle, sizeof(CUevent));
    }
    if (call.flags & 1) {
        LaunchAttribute cooperative{};
        cooperative.id = kAttributeCooperative;
        cooperative.value[0] = 1;
        attributes.push_back(cooperative);
    }
    const LaunchConfig config{call.grid_x, call.grid_y, call.grid_z, call.block_x, call.block_y, call.block_z,
                              call.shared, on->handle, attributes.data(), static_cast<uint32_t>(attributes.size())};
    return keep(*on, timing(on->handle, [&] { return driver_.launch_ex(&config, function.handle, nullptr, extra); }), seq);
}

CUresult Engine::launch_graph(const wire::GraphLaunch &call, uint64_t seq) {
    auto found = graphs_.find(call.exec);
    Stream *on = stream(call.stream);
    if (found == graphs_.end() || !on) return kInvalidHandle;
    const Counted counted(found->second.traits & kPrints ? &printing_launches_ : nullptr);
    if (found->second.traits & kAllocates) allocated_.store(true, std::memory_order_release);
    on->giving = {seq, kGraph, 0};
    return keep(*on, timing(on->handle, [&] { return driver_.graph_launch(found->second.handle, on->handle); }), seq);
}

CUresult Engine::memset(const wire::Memset &call, uint64_t seq) {
    Stream *on = stream(call.stream);
    if (!on) return kInvalidHandle;
    const uint64_t element = call.element;
    if ((element != 1 && element != 2 && element != 4) || call.width > ~uint64_t{0} / 4) return kInvalidValue;
    if (!rectangle(call.destination, call.pitch, call.width * element, call.height)) return kInvalidValue;
    const CUdeviceptr to = call.destination;
    const uint64_t width = call.width, height = call.height, pitch = call.pitch;
    if (!width || !height) return keep(*on, kSuccess, seq);
    return keep(*on, timing(on->handle, [&] {
        if (height == 1)
            return element == 1   ? driver_.set_8(to, static_cast<uint8_t>(call.value), width, on->handle)
                   : element == 2 ? driver_.set_16(to, static_cast<uint16_t>(call.value), width, on->handle)
                                  : driver_.set_32(to, call.value, width, on->handle);
        return element == 1   ? driver_.set_2d_8(to, pitch, static_cast<uint8_t>(call.value), width, height, on->handle)
               : element == 2 ? driver_.set_2d_16(to, pitch, static_cast<uint16_t>(call.value), width, height, on->handle)
                              : driver_.set_2d_32(to, pitch, call.value, width, height, on->handle);
    }), seq);
}

CUresult Engine::copy(uint64_t seq, uint64_t stream_number, CUdeviceptr destination, uint64_t destination_pitch,
                      CUdeviceptr source, uint64_t source_pitch, uint64_t width, uint64_t height) {
    Stream *on = stream(stream_number);
    if (!on) return kInvalidHandle;
    if (!rectangle(destination, destination_pitch, width, height) || !rectangle(source, source_pitch, width, height))
        return kInvalidValue;
    if (!width || !height) return keep(*on, kSuccess, seq);
    if (height == 1)
        return keep(*on, timing(on->handle, [&] { return driver_.copy(destination, source, width, on->handle); }), seq);
    Copy2D copy{};
    copy.src_type = copy.dst_type = kMemoryDevice;
    copy.src_device = source;
    copy.src_pitch = source_pitch;
    copy.dst_device = destination;
    copy.dst_pitch = destination_pitch;
    copy.width = width;
    copy.height = height;
    return keep(*on, timing(on->handle, [&] { return driver_.copy_2d(&copy, on->handle); }), seq);
}

// Copies into pinned memory of the answer's own, in pieces: the first is sent while the rest is still copied.
CUresult Engine::copy_out(uint64_t seq, uint64_t stream_number, CUdeviceptr source, uint64_t pitch, uint64_t width,
                          uint64_t height, bool callback) {
    Stream *on = stream(stream_number);
    if (!on) return kInvalidHandle;
    if (!rectangle(source, pitch, width, height)) return kInvalidValue;
    if (!width || !height) return synchronize(seq, stream_number, callback);
    if (height > 1 && pitch == width) {
        width *= height;
        height = 1;
    }
    const bool shared = area_shared_.load(std::memory_order_relaxed), soon = width * height <= kShort && !shared;
    const uint64_t longest = shared ? 2 * kLongPiece : kLongPiece;  // those that are not sent cost the same at any length
    const uint64_t piece = soon ? kShortPiece : width * height <= kLong ? kPiece : longest;
    // Whole rows, or one row in parts.
    const uint64_t rows = height == 1 ? 1 : std::clamp<uint64_t>(piece / width, 1, height);
    const uint64_t parts = (width + piece - 1) / piece;
    const uint64_t count = rows > 1 ? (height + rows - 1) / rows : height * parts;
    if (count > (1u << 24)) return kInvalidValue;
    HostBuffer buffer;
    {
        std::lock_guard lock(mutex_);
        // One small piece needs no room behind it.
        const size_t last = count == 1 ? (rows > 1 ? height * width : width) : piece;
        if (CUresult result = staging_.take_buffer((count - 1) * (piece + kHeadroom) + kHeadroom + last, buffer))
            return result;
    }
    std::unique_lock lock(mutex_);
    Answer *answer = expect(seq, callback);
    answer->buffer = buffer;
    answer->longest = piece;
    answer->pieces.reserve(count);
    CUresult result = kSuccess;
    for (uint64_t row = 0, part = 0; row < height && !result;) {
        const uint64_t many = std::min(rows, height - row);
        const uint64_t from = part * piece, length = rows > 1 ? many * width : std::min<uint64_t>(piece, width - from);
        const auto index = static_cast<uint32_t>(answer->pieces.size());
        answer->pieces.push_back(static_cast<uint32_t>(length));
        uint8_t *to = answer->piece(index);
        if (many == 1) {
            result = driver_.copy_out(to, source + row * pitch + from, length, on->handle);
        } else {
            Copy2D copy{};
            copy.src_type = kMemoryDevice;
            copy.src_device = source + row * pitch;
            copy.src_pitch = pitch;
            copy.dst_type = kMemoryHost;
            copy.dst_host = to;
            copy.dst_pitch = copy.width = width;
            copy.height = many;
            result = driver_.copy_2d(&copy, on->handle);
        }
        if (++part == parts || many > 1) {
            part = 0;
            row += many;
        }
        if (sticks(result)) {
            fail(result);
            result = kSuccess;
        }
        if (result) break;
        submit(*on, row == height ? seq : 0);
        on->actions.push_back({.kind = Action::piece, .tick = on->tick, .answer = answer, .index = index});
        ++answer->references;
        mark_stream(*on);
    }
    if (result) {  // refused by the driver: the answer carries the error
        if (!answer->done) finish(answer, result);
        submit(*on, seq);
    }
    drop(answer);
    return kSuccess;
}

CUresult Engine::record_event(const wire::EventRecord &call, uint64_t seq) {
    auto found = events_.find(call.event);
    Stream *on = stream(call.stream);
    if (found == events_.end() || !on) return kInvalidHandle;
    Event &event = found->second;
    if (!event_waits_.empty()) {
        std::lock_guard lock(mutex_);
        settle_event(event.handle);
    }
    const uint64_t worked = on->worked;
    if (CUresult result = keep(*on, driver_.event_record(event.handle, on->handle), seq)) return result;
    on->worked = worked;
    event.seq = seq;
    event.stream = call.stream;
    event.tick = on->tick;
    event.identity = on->identity;
    remember_past(event, *on);
    return kSuccess;
}

CUresult Engine::wait_event(const wire::StreamWaitEvent &call, uint64_t seq) {
    auto found = events_.find(call.event);
    Stream *on = stream(call.stream);
    if (found == events_.end() || !on) return kInvalidHandle;
    boundary(*on);
    const uint64_t worked = on->worked;
    before_wait(*on);
    if (CUresult result = keep(*on, driver_.stream_wait_event(on->handle, found->second.handle, 0), seq)) return result;
    on->worked = worked;
    waits(*on, found->second);
    comes_behind(*on, found->second);
    return kSuccess;
}

// Answers when all earlier work of the stream is complete.
CUresult Engine::synchronize(uint64_t seq, uint64_t number, bool callback) {
    Stream *one = stream(number);
    if (!one) return kInvalidHandle;
    std::lock_guard lock(mutex_);
    // A legacy stream waits for the blocking ones: a marker in it does so, too.
    if (is_legacy(number) && !active_.empty()) ++one->tick;
    return await_streams(seq, one->done != one->tick ? std::vector<Stream *>{one} : std::vector<Stream *>{}, callback);
}

CUresult Engine::synchronize_all(uint64_t seq, CUcontext context, bool callback) {
    std::lock_guard lock(mutex_);
    std::vector<Stream *> those = active_;
    if (context) std::erase_if(those, [&](Stream *stream) { return stream->context != context; });
    return await_streams(seq, those, callback);
}

// The caller holds the mutex.
CUresult Engine::await_streams(uint64_t seq, const std::vector<Stream *> &those, bool callback) {
    Answer *answer = expect(seq, callback);
    for (Stream *stream : those) {
        stream->pending.emplace_back(stream->tick, seq);
        ++pending_;
        stream->actions.push_back({.kind = Action::wait, .tick = stream->tick, .answer = answer});
        ++answer->waits;
        ++answer->references;
        activate(*stream);
        mark_stream(*stream);
    }
    if (those.empty()) finish(answer, kSuccess);
    else busy_.notify_one();
    drop(answer);
    return kSuccess;
}

CUresult Engine::synchronize_event(uint64_t seq, uint64_t number, bool callback) {
    auto found = events_.find(number);
    if (found == events_.end()) return kInvalidHandle;
    const Event &event = found->second;
    std::lock_guard lock(mutex_);
    Answer *answer = expect(seq, callback);
    const EventWait wait{answer, event.handle, event.stream, event.tick};
    if (event.seq && unfinished(wait)) {
        ++answer->references;
        event_waits_.push_back(wait);
        busy_.notify_one();
    } else {
        finish(answer, kSuccess);
    }
    drop(answer);
    return kSuccess;
}

// Decodes and applies a hot call, except `completed` and streamed payloads. The result is that of the call itself.
CUresult Engine::call(const RecordView &view, bool callback, bool &decoded) {
    const auto &header = view.header;
    const uint64_t seq = header.seq;
    const auto read = [&](auto &call) { return decoded = call.read(view.args, header.args_len); };
    const int broken = error() ? error() : broken_.load(std::memory_order_acquire);
    if (broken && wire::awaited(header.call)) return broken;
    switch (header.call) {
        case wire::Launch::id:
            if (wire::Launch call; read(call)) return launch(call, seq);
            break;
        case wire::GraphLaunch::id:
            if (wire::GraphLaunch call; read(call)) return launch_graph(call, seq);
            break;
        case wire::Memset::id:
            if (wire::Memset call; read(call)) return memset(call, seq);
            break;
        case wire::MemcpyD2h::id:
            if (wire::MemcpyD2h call; read(call))
                return copy_out(seq, call.stream, call.source, call.size, call.size, 1, callback);
            break;
        case wire::Memcpy2dD2h::id:
            if (wire::Memcpy2dD2h call; read(call))
                return copy_out(seq, call.stream, call.source, call.pitch, call.width, call.height, callback);
            break;
        case wire::MemcpyD2d::id:
            if (wire::MemcpyD2d call; read(call))
                return copy(seq, call.stream, call.destination, call.size, call.source, call.size, call.size, 1);
            break;
        case wire::Memcpy2dD2d::id:
            if (wire::Memcpy2dD2d call; read(call))
                return copy(seq, call.stream, call.destination, call.destination_pitch, call.source,
                            call.source_pitch, call.width, call.height);
            break;
        case wire::EventRecord::id:
            if (wire::EventRecord call; read(call)) return record_event(call, seq);
            break;
        case wire::StreamWaitEvent::id:
            if (wire::StreamWaitEvent call; read(call)) return wait_event(call, seq);
            break;
        case wire::StreamSynchronize::id:
            if (wire::StreamSynchronize call; read(call)) return synchronize(seq, call.stream, callback);
            break;
        case wire::ContextSynchronize::id:
            if (wire::ContextSynchronize call; read(call)) {
                auto found = contexts_.find(call.context);
                return synchronize_all(seq, found == contexts_.end() ? nullptr : found->second, callback);
            }
            break;
        case wire::EventSynchronize::id:
            if (wire::EventSynchronize call; read(call)) return synchronize_event(seq, call.event, callback);
            break;
        default: decoded = false;
    }
    return kInvalidValue;
}

// One call from Python: answers come as callbacks, errors of the call are returned.
CUresult Engine::apply(uint16_t id, uint64_t seq, const uint8_t *args, size_t args_len, const uint8_t *payload,
                       size_t payload_len) {
    use();
    RecordView view;
    view.header.call = id;
    view.header.seq = seq;
    view.header.args_len = static_cast<uint32_t>(args_len);
    view.header.payload_len = payload_len;
    view.args = args;
    view.payload = payload;
    Bad bad = Bad::none;
    bool decoded = true;
    if (id != wire::MemcpyH2d::id && id != wire::Memcpy2dH2d::id) {
        const CUresult result = call(view, true, decoded);
        return decoded ? result : kInvalidValue;
    }
    Inflow kept = inflow_;  // a record of the stream may be half there
    direct_ = true;
    direct_result_ = kSuccess;
    if (open_inflow(view, bad)) {
        bool interrupted = false;
        inflow_.skip = false;
        inflow_.padding = 0;
        inflow(payload, payload_len, nullptr, interrupted, bad);
        if (inflow_.open) end_inflow();  // no checksum exists for data from this process
    }
    direct_ = false;
    inflow_ = kept;
    return direct_result_;
}

// The next work may stop the stream until the program reacts to the completion of earlier work: a marker behind the
// wait would report that too late.
void Engine::boundary(Stream &stream) {
    std::lock_guard lock(mutex_);
    if (stream.done != stream.tick) mark_stream(stream);
}

void Engine::boundary(uint64_t number) {
    use();
    if (Stream *on = stream(number)) boundary(*on);
}

void Engine::submitted(uint64_t number, uint64_t seq) {
    std::lock_guard lock(mutex_);
    if (Stream *on = stream(number)) submit(*on, seq);
}

CUresult Engine::mark(uint64_t stream, uint64_t seq, bool all) {
    use();
    return all ? synchronize_all(seq, nullptr, true) : synchronize(seq, stream, true);
}

CUresult Engine::mark_context(CUcontext context, uint64_t seq) {
    use();
    return synchronize_all(seq, context, true);
}

// -- tables -----------------------------------------------------------------------

void Engine::add_stream(uint64_t number, CUstream handle, CUcontext context) {
    remove_stream(number);  // an earlier one of that number may still have work
    std::lock_guard lock(mutex_);
    auto stream = std::make_unique<Stream>();
    stream->number = number;
    stream->identity = ++identities_;
    stream->handle = handle;
    stream->context = context;
    several_ = several_ || context != context_;
    streams_[number] = std::move(stream);
}

// Its work still runs to its end: a marker is recorded behind it, so that the handle is not needed for that.
bool Engine::remove_stream(uint64_t number) {
    use();
    std::lock_guard lock(mutex_);
    auto found = streams_.find(number);
    if (found == streams_.end()) return false;
    Stream &stream = *found->second;
    if (stream.done != stream.tick) {
        mark_stream(stream);
        leaving_.push_back(std::move(found->second));
    }
    streams_.erase(found);
    return true;
}

void Engine::add_event(uint64_t number, CUevent handle) { events_[number] = {handle}; }

void Engine::remove_event(uint64_t number) {
    std::lock_guard lock(mutex_);
    auto found = events_.find(number);
    if (found == events_.end()) return;
    settle_event(found->second.handle);
    events_.erase(found);
}

uint64_t Engine::event_recorded(uint64_t number) {
    auto found = events_.find(number);
    return found == events_.end() ? 0 : found->second.seq;
}

void Engine::add_module(uint64_t number, const Function *functions, size_t count) {
    modules_[number].assign(functions, functions + count);
}

void Engine::add_range(CUdeviceptr address, uint64_t size) {
    ranges_[address] = size;
    last_range_size_ = 0;
}

bool Engine::remove_range(CUdeviceptr address) {
    last_range_size_ = 0;
    return ranges_.erase(address) > 0;
}

bool Engine::contains(CUdeviceptr address, uint64_t size) {
    const auto within = [&](CUdeviceptr start, uint64_t length) {
        return address >= start && address - start <= length && size <= length - (address - start);
    };
    if (last_range_size_ && within(last_range_, last_range_size_)) return true;
    auto found = ranges_.upper_bound(address);
    if (found == ranges_.begin()) return false;
    --found;
    if (!within(found->first, found->second)) {
        // Or in several without a gap: separate mappings of one range (cuMemMap).
        if (size > ~uint64_t{0} - address || address >= found->first + found->second) return false;
        CUdeviceptr end = found->first + found->second;
        for (++found; end < address + size && found != ranges_.end() && found->first == end; ++found)
            end += found->second;
        return address + size <= end;
    }
    last_range_ = found->first;
    last_range_size_ = found->second;
    return true;
}

// -- life -----------------------------------------------------------------------------

std::string Engine::open(size_t ring, size_t arena) {
    if (std::string missing = driver_.open(); !missing.empty()) return missing;
    use();
    if (CUresult result = staging_.open(ring, arena))
        return "pinned memory: the driver answers " + std::to_string(result);
    poller_ = std::thread([this] { poll(); });
    return {};
}

void Engine::close() {
    stop();
    use();
    for (auto &[context, events] : spare_)
        for (CUevent event : events) driver_.event_destroy(event);
    spare_.clear();
    for (auto &[context, events] : spare_timing_)
        for (CUevent event : events) driver_.event_destroy(event);
    spare_timing_.clear();
    for (auto &[data, size] : windows_) driver_.host_unregister(const_cast<uint8_t *>(data));
    windows_.clear();
    staging_.close();
}

Engine::~Engine() {
    for (auto &[seq, answer] : retained_) delete answer;
}

}  // namespace rgpu
