// Communicators and groups of collectives as calls, for libnccl.so.2 (rgpu/client/nccl).
#include "collectives.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "capturing.hpp"
#include "context.hpp"
#include "graph_exec.hpp"
#include "managed.hpp"
#include "memory.hpp"

namespace rgpu {
namespace {

// Counts of operations: of each communicator, and of its sends and receives with each peer. Guarded by the Section, in
// which operations get their numbers, so that the numbers follow the journal's order.
using Counted = std::array<std::uint64_t, 3>;  // communicator, kind where it names a peer (else 0), peer
std::map<Counted, std::uint64_t>& given() {
  static auto* counts = new std::map<Counted, std::uint64_t>;
  return *counts;
}

constexpr std::uint8_t kSend = 8;  // and 9, receive

void give_numbers(std::vector<CollectiveOperation>& operations) {
  for (CollectiveOperation& one : operations) {
    const bool paired = one.kind >= kSend;
    one.number = given()[{one.communicator, paired ? one.kind : 0u, paired ? static_cast<std::uint64_t>(one.peer) : 0}]++;
  }
}

void take_back(const std::vector<CollectiveOperation>& operations) {
  for (const CollectiveOperation& one : operations) {
    const bool paired = one.kind >= kSend;
    --given()[{one.communicator, paired ? one.kind : 0u, paired ? static_cast<std::uint64_t>(one.peer) : 0}];
  }
}

// Communicators that exist.
std::mutex& living_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}
std::set<std::uint64_t>& living() {
  static auto* numbers = new std::set<std::uint64_t>;
  return *numbers;
}

CUresult create(std::uint32_t ranks, std::uint32_t rank, const void* unique, std::uint32_t unique_size,
                const void* members, std::uint32_t members_size, std::uint64_t* number) {
  Context* context = nullptr;
  if (CUresult r = current(context); r) return r;
  wire::CommunicatorCreate call{};
  call.context = context->number;
  call.ranks = ranks;
  call.rank = rank;
  call.unique = {unique, unique_size};
  call.members = {members, members_size};
  call.communicator = *number = next_number();
  if (CUresult r = await(call); r) return r;
  std::lock_guard guard(living_lock());
  living().insert(call.communicator);
  return CUDA_SUCCESS;
}

CUresult destroy(std::uint64_t number, bool abort) {
  wire::CommunicatorDestroy call{};
  call.communicator = number;
  call.abort = abort;
  {
    std::lock_guard guard(living_lock());
    living().erase(number);
  }
  Section section;
  given().erase(given().lower_bound({number, 0, 0}), given().lower_bound({number + 1, 0, 0}));
  return section.publish(call);
}

using Operations = std::vector<CollectiveOperation>;
using Ranges = std::vector<CollectiveRange>;

CUresult check_ranges(const Ranges& ranges) {
  for (const CollectiveRange& range : ranges) {
    Place place;
    if (CUresult r = check_device(range.address, range.size, &place); r) return r;
    if (place.kind != Place::Kind::device) {
      log_once("collective on host memory", "a collective of NCCL on memory that is not a device's is not supported");
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

thread_local std::uint64_t last_stream = 0, last_seq = 0;

// `operations` name their streams by number; `streams` contains each of these once. Nothing is published on an error.
CUresult publish(Operations& operations, const Ranges& ranges, const std::vector<StreamRef>& streams) {
  if (CUresult r = check_ranges(ranges); r) return r;
  std::deque<ManagedUse> managed;
  for (const StreamRef& stream : streams) {
    ManagedUse& use = managed.emplace_back(stream);
    for (const CollectiveRange& range : ranges) use.range(range.address, range.size);
    if (CUresult r = use.upload(); r) return r;
  }
  wire::CollectiveGroup call{};
  call.stream = operations[0].stream;
  call.operations = {operations.data(), static_cast<std::uint32_t>(operations.size() * sizeof operations[0])};
  Section section;  // held until the work is noted: the notes of two threads keep the journal's order
  std::uint64_t seq = 0;
  give_numbers(operations);
  if (CUresult r = section.publish(call, &seq); r) {
    take_back(operations);
    return r;
  }
  for (const StreamRef& stream : streams) note_work(stream, seq);
  last_stream = call.stream;
  last_seq = seq;
  for (ManagedUse& use : managed) use.given(seq);
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- in a stream capture

// Orders the work that `behind` captures from now on after the work that `before` has captured. Both are in one
// capture.
CUresult join(const StreamRef& behind, const StreamRef& before) {
  Event event;  // of this capture alone: it does not exist on a server
  event.number = next_number();
  bool taken = false;
  CUresult r = capture_record(before, event, 0, taken);
  if (!r) r = capture_wait(behind, event, 0, taken);
  event_gone(event);
  return r;
}

// Captures a group as one node: after the work of all its streams, and before their next captured work, as NCCL does.
CUresult capture(Operations& operations, Ranges&& ranges, const std::vector<StreamRef>& streams, Context* context,
                 bool& taken) {
  std::uint64_t first = 0;
  for (std::size_t i = 0; i < streams.size(); ++i) {
    std::uint64_t id = 0;
    if (CUresult r = open_capture_of(streams[i], id); r) return r;
    if (!i) first = id;
    if (id == first) continue;
    log_once("collectives of two captures", "ncclGroupEnd: the streams of a group are captured into different graphs, or "
                                            "only some of them are");
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (!first) return CUDA_SUCCESS;
  for (std::size_t i = 1; i < streams.size(); ++i)
    if (CUresult r = join(streams[0], streams[i]); r) return r;
  for (CollectiveOperation& one : operations) one.stream = 0;
  if (CUresult r = capture_work(streams[0], CollectivesWork{operations, std::move(ranges), context}, taken); r) return r;
  for (std::size_t i = 1; i < streams.size(); ++i)
    if (CUresult r = join(streams[i], streams[0]); r) return r;
  return CUDA_SUCCESS;
}

CUresult group(const CollectiveOperation* operations, const CUcontext* contexts, std::size_t count,
               const CollectiveRange* ranges, std::size_t range_count) {
  if (CUresult r = require(); r) return r;
  Operations asked(operations, operations + count);
  Ranges touched(ranges, ranges + range_count);
  std::vector<StreamRef> streams;
  for (std::size_t i = 0; i < count; ++i) {
    InContext inside(contexts[i]);
    if (inside.result) return inside.result;
    StreamRef stream;
    if (CUresult r = resolve_stream(reinterpret_cast<CUstream>(asked[i].stream), stream); r) return r;
    asked[i].stream = stream.number;
    if (std::none_of(streams.begin(), streams.end(), [&](const StreamRef& s) { return s.number == stream.number; }))
      streams.push_back(stream);
  }
  if (capture_open()) {
    bool taken = false;
    if (CUresult r = capture(asked, std::move(touched), streams, find(contexts[0]), taken); r || taken) return r;
  }
  return publish(asked, touched, streams);
}

void unsupported(const char* name) {
  report_unsupported(name);
  log_once(std::string("unsupported ") + name, "%s is not supported: it returns ncclInvalidUsage", name);
}

void complain(const char* key, const char* text) { log_once(key, "%s", text); }

}  // namespace

bool ranges_there(const std::vector<CollectiveRange>& ranges) {
  return std::ranges::all_of(ranges, [](const CollectiveRange& range) {
    Place place;
    return !check_device(range.address, range.size, &place) && place.kind == Place::Kind::device;
  });
}

bool communicators_there(const std::vector<CollectiveOperation>& operations) {
  std::lock_guard guard(living_lock());
  return std::ranges::all_of(operations, [](const CollectiveOperation& one) { return living().contains(one.communicator); });
}

CUresult launch_collectives(const CollectivesWork& work, CUstream handle) {
  StreamRef stream;
  if (CUresult r = resolve_stream(handle, stream); r) return r;
  std::vector<CollectiveOperation> asked = work.operations;
  for (CollectiveOperation& one : asked) one.stream = stream.number;
  return publish(asked, work.ranges, {stream});
}

void last_group(std::uint64_t* stream, std::uint64_t* seq) {
  *stream = last_stream;
  *seq = last_seq;
}

const CollectivesTable& collectives_table() {
  static const CollectivesTable table{sizeof(CollectivesTable), create, destroy, group, unsupported, complain,
                                      require, nullptr};
  return table;
}

}  // namespace rgpu
