// Accesses of kernels to pinned host memory (SEMANTICS 7).
//
// Kernels access a range's mirror in the worker. For each range that a kernel was given, a *twin* holds the bytes on
// which host and mirror last agreed: bytes that the CPU changed since are sent to the mirror before a launch, in its
// stream; bytes that the mirror changed since are copied back when the program learns that the kernel is complete. Both
// depend on work known to be complete, and each such completion is recorded in the journal before the calls that rely
// on it (SEMANTICS 1): a replay has no watermark.
//
// One word of a small range may be polled by a kernel: if it is all that the CPU changed in the range, it is sent when
// the program begins to wait, or asks and work is under way.
#include <algorithm>
#include <cstring>
#include <deque>

#include "device.hpp"
#include "downloads.hpp"
#include "pinned.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::size_t BLOCK = 4096;  // bytes of host memory, uploaded as a whole
constexpr std::uint64_t POLLED = 65536;  // largest range that is compared at every wait
constexpr std::uint64_t WORD = 8;  // bytes, aligned, that a CPU writes at once

// The pinned ranges with mirrors that these addresses point into, each once.
std::vector<std::shared_ptr<Pinned>> mirrored(const std::vector<std::uint64_t>& addresses) {
  std::vector<std::shared_ptr<Pinned>> found;
  for (std::uint64_t address : addresses) {
    auto range = range_of_mirror(address);
    if (range && std::find(found.begin(), found.end(), range) == found.end())
      found.push_back(std::move(range));
  }
  std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a->address < b->address; });  // one lock order
  return found;
}

// ---------------------------------------------------------------- to the mirror

CUresult upload_run(Pinned& range, const StreamRef& stream, std::uint64_t from, std::uint64_t to) {
  wire::HostMirrorWrite call{};
  call.address = range.mirror + from;
  call.stream = stream.number;
  std::uint64_t seq = 0;
  Payload payload(range.twin.data() + from, to - from);
  if (CUresult r = submit_work(stream, call, payload, &seq); r) return r;
  range.uploads.push_back({stream.number, seq, from, to, stream.context->number});
  range.uploaded = std::max(range.uploaded, seq);
  return CUDA_SUCCESS;
}

// Sends the bytes that the CPU changed since host and mirror agreed. While a kernel may be writing the mirror only
// changed bytes are sent, else whole blocks.
CUresult upload(Pinned& range, const StreamRef& stream) {
  const auto* host = reinterpret_cast<const std::uint8_t*>(range.address);
  if (range.twin.empty()) range.twin.resize(range.size);  // a new mirror holds zeros
  const bool exact = !range.writers.empty() || range.launching;
  std::uint8_t copy[BLOCK];
  std::uint64_t run = range.size;  // start of the run being collected; size: none
  for (std::uint64_t at = 0; at < range.size; at += BLOCK) {
    const std::size_t n = std::min<std::uint64_t>(BLOCK, range.size - at);
    std::memcpy(copy, host + at, n);  // compare and ship the same bytes
    std::uint8_t* twin = range.twin.data() + at;
    const bool changed = std::memcmp(copy, twin, n) != 0;
    if (!changed || exact) {
      if (run < range.size)
        if (CUresult r = upload_run(range, stream, run, at); r) return r;
      run = range.size;
      if (!changed) continue;
      for (std::size_t i = 0; i < n; ++i) {
        if (copy[i] == twin[i]) continue;
        std::size_t end = i;
        for (; end < n && copy[end] != twin[end]; ++end) twin[end] = copy[end];
        if (CUresult r = upload_run(range, stream, at + i, at + end); r) return r;
        i = end;
      }
      continue;
    }
    std::memcpy(twin, copy, n);
    if (run == range.size) run = at;
  }
  return run < range.size ? upload_run(range, stream, run, range.size) : CUDA_SUCCESS;
}

// Forgets the uploads that are complete, and records that: the next calls in the journal rely on it. Range's lock held.
void forget_complete_uploads(Pinned& range) {
  std::map<std::uint64_t, std::uint64_t> complete;  // stream -> the last of them
  std::erase_if(range.uploads, [&](const Upload& upload) {
    if (!complete_on(upload.stream, upload.seq)) return false;
    complete[upload.stream] = std::max(complete[upload.stream], upload.seq);
    return true;
  });
  for (auto [stream, seq] : complete) observed(seq);
}

// Makes the stream's next work wait for uploads on other streams that may be unfinished.
CUresult join_uploads(Pinned& range, const StreamRef& stream) {
  forget_complete_uploads(range);
  std::map<std::uint64_t, std::uint64_t> others;  // stream -> its context
  for (const Upload& upload : range.uploads)
    if (upload.stream != stream.number) others[upload.stream] = upload.context;
  for (auto [other, context] : others) {
    Section section;
    if (section.status()) return section.status();
    wire::EventCreate create{};
    create.event = next_number();
    create.context = context;  // an event belongs to the device that records it
    create.flags = CU_EVENT_DISABLE_TIMING;
    wire::EventRecord record{};
    record.event = create.event;
    record.stream = other;
    wire::StreamWaitEvent wait{};
    wait.stream = stream.number;
    wait.event = create.event;
    wire::EventDestroy destroy{};
    destroy.event = create.event;
    CUresult r = section.publish(create);
    if (!r) r = section.publish(record);
    if (!r) r = section.publish(wait);
    if (!r) r = section.publish(destroy);
    if (r) return r;
  }
  return CUDA_SUCCESS;
}

bool is_lost(std::uint64_t stream) {
  Pins& p = pins();
  std::shared_lock guard(p.lock);
  return p.lost.contains(stream);
}

// Waits for uploads of streams that are destroyed: no event can be recorded after them.
CUresult finish_lost(Pinned& range) {
  {
    Pins& p = pins();
    std::shared_lock guard(p.lock);
    if (p.lost.empty()) return CUDA_SUCCESS;
  }
  bool waits = false;
  {
    std::lock_guard guard(range.lock);
    for (const Upload& upload : range.uploads) waits |= is_lost(upload.stream) && !complete_on(upload.stream, upload.seq);
  }
  return waits ? wait_for_device_number(kEveryDevice) : CUDA_SUCCESS;
}

// ---------------------------------------------------------------- from the mirror

// A stream without other work: a read on it waits for nothing.
CUresult reader_of(Context& context, std::uint64_t& number) {
  Section section;  // before the tables' lock, as everywhere
  if (section.status()) return section.status();
  Pins& p = pins();
  std::unique_lock guard(p.lock);
  if (auto it = p.readers.find(&context); it != p.readers.end()) {
    number = it->second;
    return CUDA_SUCCESS;
  }
  wire::StreamCreate call{};
  call.stream = number = next_number();
  call.context = context.number;
  call.flags = CU_STREAM_NON_BLOCKING;
  if (CUresult r = section.publish(call); r) return r;
  p.readers[&context] = number;
  return CUDA_SUCCESS;
}

// Removes the writers that are known to be complete, and records that in the journal. Returns how many. Range's lock
// held.
std::size_t written(Pinned& range) {
  std::size_t finished = 0;
  std::uint64_t behind = 0;
  for (auto it = range.writers.begin(); it != range.writers.end();) {
    if (complete_on(it->first, it->second.seq)) {
      observed(it->second.seq);
      behind = std::max(behind, it->second.behind);
      it = range.writers.erase(it);
      ++finished;
    } else {
      ++it;
    }
  }
  std::erase_if(range.uploads, [&](const Upload& upload) { return upload.seq <= behind; });
  return finished;
}

// One read of a mirror; no other thread accesses the range meanwhile.
struct Reading {
  std::shared_ptr<Pinned> range;
  std::unique_lock<std::mutex> held;
  std::size_t writers = 0;
  std::vector<std::uint8_t> now;
  std::vector<Upload> under_way;  // parts of the mirror that may still hold older bytes
  Answer answer;
  Waiter waiter;
  std::uint64_t seq = 0;

  CUresult ask() {
    forget_complete_uploads(*range);
    under_way = range->uploads;
    wire::HostMirrorRead call{};
    call.address = range->mirror;
    call.size = range->size;
    if (CUresult r = reader_of(*range->context, call.stream); r) return r;
    now.resize(range->size);
    waiter.answer = &answer;
    waiter.destination = now.data();
    waiter.capacity = now.size();
    Section section(view(call).reserved);
    return section.publish_view(view(call), nullptr, &waiter, &seq);
  }

  // Copies back the bytes that differ from the twin: those that kernels wrote.
  void take() {
    if (!collect(wire::HostMirrorRead::id, waiter, seq) && answer.payload_size == now.size()) {
      auto* host = reinterpret_cast<std::uint8_t*>(range->address);
      const bool kept = range->registered && (range->flags & CU_MEMHOSTREGISTER_READ_ONLY);  // kernels may not write it
      for (const Upload& upload : under_way)
        std::copy_n(range->twin.data() + upload.from, upload.to - upload.from, now.data() + upload.from);
      for (std::uint64_t at = 0; at < range->size; at += BLOCK) {
        const std::size_t n = std::min<std::uint64_t>(BLOCK, range->size - at);
        if (!std::memcmp(now.data() + at, range->twin.data() + at, n)) continue;
        for (std::size_t i = at; i < at + n; ++i) {
          if (now[i] == range->twin[i]) continue;
          range->twin[i] = now[i];
          if (!kept) host[i] = now[i];
        }
      }
    }
    pins().in_use -= writers;  // only now: a thread that finds none in use returns to the program at once
  }
};

// Copies back the ranges whose writers are known to be complete: all reads are published before the first is waited
// for.
void bring_back(const std::vector<std::shared_ptr<Pinned>>& ranges) {
  ReservedSpace space;  // a call that reports a completion must not wait for space
  std::deque<Reading> readings;
  for (const auto& range : ranges) {
    std::unique_lock guard(range->lock);
    if (range->ended) continue;
    const std::size_t writers = written(*range);
    if (!writers) continue;
    Reading& reading = readings.emplace_back();
    reading.range = range;
    reading.held = std::move(guard);
    reading.writers = writers;
    if (reading.ask()) {
      pins().in_use -= writers;
      readings.pop_back();
    }
  }
  for (Reading& reading : readings) reading.take();
}

bool mirrors_in_use() { return pins().in_use.load(std::memory_order_relaxed) != 0; }

// ---------------------------------------------------------------- to a kernel that runs

// Finds what the CPU changed since host and mirror agreed, from the first to the last changed byte. True: that is part
// of one word, whose bytes are in `word`.
bool changed_word(const Pinned& range, std::uint64_t& from, std::uint64_t& to, std::uint8_t (&word)[WORD]) {
  const auto* host = reinterpret_cast<const std::uint8_t*>(range.address);
  std::uint64_t first = 0;
  for (std::uint64_t n; first < range.size; first += n) {
    n = std::min<std::uint64_t>(BLOCK, range.size - first);
    if (!std::memcmp(host + first, range.twin.data() + first, n)) continue;
    first = std::mismatch(host + first, host + first + n, range.twin.data() + first).first - host;
    break;
  }
  if (first >= range.size) return false;
  const std::uint64_t end = std::min(((range.address + first) / WORD + 1) * WORD - range.address, range.size);
  std::memcpy(word, host + first, end - first);  // compare and ship the same bytes
  for (from = to = first; first < end; ++first)
    if (word[first - from] != range.twin[first]) to = first + 1;
  return to > from && !std::memcmp(host + end, range.twin.data() + end, range.size - end);
}

// Sends that word, on the stream that waits for nothing: the kernel that polls it holds up its own.
CUresult send_word(Pinned& range) {
  std::uint64_t from = 0, to = 0;
  std::uint8_t word[WORD];
  if (!changed_word(range, from, to, word)) return CUDA_SUCCESS;
  wire::HostWordWrite call{};
  call.address = range.mirror + from;
  if (CUresult r = reader_of(*range.context, call.stream); r) return r;
  Payload payload(word, to - from);
  std::uint64_t seq = 0;
  Section section;
  if (CUresult r = section.publish(call, payload, &seq); r) return r;
  given(call.stream, seq, session_device(range.context->device), false);
  std::copy_n(word, to - from, range.twin.data() + from);
  range.uploads.push_back({call.stream, seq, from, to, range.context->number});
  range.uploaded = std::max(range.uploaded, seq);
  return CUDA_SUCCESS;
}

std::vector<std::shared_ptr<Pinned>> all_ranges() {
  Pins& p = pins();
  std::shared_lock guard(p.lock);
  std::vector<std::shared_ptr<Pinned>> found;
  for (auto& [address, range] : p.ranges)
    if (range->mirror) found.push_back(range);
  return found;
}

// Waits for the kernels that may write the range, whichever streams they are in, and copies back what they wrote.
CUresult finish_writers(const std::shared_ptr<Pinned>& range) {
  std::map<std::uint64_t, Writer> writers;
  {
    std::lock_guard guard(range->lock);
    writers = range->writers;
  }
  for (auto [stream, writer] : writers) {
    if (is_lost(stream)) {
      if (complete_on(stream, writer.seq)) continue;
      if (CUresult r = wait_for_device_number(kEveryDevice); r) return r;
      continue;
    }
    wire::StreamSynchronize call{};
    call.stream = stream;
    Answer answer;
    Payload none;
    const std::uint64_t waited = stream;
    if (CUresult r = await_view(view(call), none, answer, nullptr, 0, [&](std::uint64_t seq, bool answered) {
          if (answered) learned(waited, seq);
        }); r)
      return r;
  }
  // Only the range about to be used: others are copied back when the program learns of a completion.
  if (!writers.empty()) bring_back({range});
  return CUDA_SUCCESS;
}

}  // namespace

bool host_memory_in_use() { return mirrors_in_use() || downloads_open(); }

void send_polled_words() {
  if (!mirrors_in_use()) return;
  wait_for_space(session(), false);  // here, where no range is locked
  ReservedSpace space;
  for (const auto& range : all_ranges()) {
    std::unique_lock guard(range->lock, std::try_to_lock);  // else it is being read, for its kernels have ended
    if (!guard || range->ended || range->size > POLLED || range->twin.empty()) continue;
    const bool running = std::any_of(range->writers.begin(), range->writers.end(),
                                     [](auto& writer) { return !complete_on(writer.first, writer.second.seq); });
    if (running && send_word(*range)) return;  // a session that cannot be given calls says so at the wait
  }
}

void bring_back_host_memory() {
  finish_downloads();
  if (mirrors_in_use()) bring_back(all_ranges());
}

void mirrors_lose_stream(const Stream& stream) {
  if (!any_pinned() || complete_on(stream.number, stream.last.load())) return;
  Pins& p = pins();
  std::unique_lock guard(p.lock);
  p.lost.insert(stream.number);
}

CUresult finish_writers_of_source(std::uint64_t address, std::uint64_t) {
  wait_host_functions();
  auto range = range_of(address);
  if (range) finish_downloads_into(range->address, range->size);
  return range && range->mirror ? finish_writers(range) : CUDA_SUCCESS;
}

CUresult finish_writers_of_destination(std::uint64_t address) {
  if (!mirrors_in_use()) return CUDA_SUCCESS;
  auto range = range_of(address);
  return range && range->mirror ? finish_writers(range) : CUDA_SUCCESS;
}

MirrorUse::MirrorUse(const StreamRef& stream, const std::vector<std::uint64_t>& addresses) : stream_(stream) {
  if (addresses.empty() || !any_pinned()) return;
  for (auto& range : mirrored(addresses)) used_.push_back({range});
}

CUresult MirrorUse::upload() {
  if (used_.empty()) return CUDA_SUCCESS;
  wait_for_space(session(), false);  // here, where no range is locked
  for (Used& used : used_) {
    finish_downloads_into(used.range->address, used.range->size);
    if (CUresult r = finish_lost(*used.range); r) return r;
  }
  ReservedSpace space;
  for (Used& used : used_) {
    Pinned& range = *used.range;
    std::lock_guard guard(range.lock);
    if (range.ended) continue;
    if (CUresult r = rgpu::upload(range, stream_); r) return r;
    if (CUresult r = join_uploads(range, stream_); r) return r;
    used.behind = range.uploaded;
    used.begun = true;
    ++range.launching;  // from here on only changed bytes may be sent to the mirror
    ++pins().in_use;
  }
  return CUDA_SUCCESS;
}

void MirrorUse::given(std::uint64_t seq) {
  for (Used& used : used_) {
    std::lock_guard guard(used.range->lock);
    if (!used.begun) continue;
    used.begun = false;
    --used.range->launching;
    if (used.range->ended) {
      --pins().in_use;
      continue;
    }
    auto [it, fresh] = used.range->writers.try_emplace(stream_.number);
    it->second.seq = std::max(it->second.seq, seq);
    it->second.behind = std::max(it->second.behind, used.behind);
    if (!fresh) --pins().in_use;  // the stream's writer is counted once
  }
}

MirrorUse::~MirrorUse() {
  for (Used& used : used_) {
    std::lock_guard guard(used.range->lock);
    if (!used.begun) continue;
    --used.range->launching;
    --pins().in_use;
  }
}

}  // namespace rgpu
