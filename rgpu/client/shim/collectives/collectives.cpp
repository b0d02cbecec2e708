// Communicators and groups of collectives as calls, for libnccl.so.2 (rgpu/client/nccl).
#include "collectives.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <map>

#include "capturing.hpp"
#include "managed.hpp"
#include "memory.hpp"

namespace rgpu {
namespace {

// How many operations were given: of each communicator, and of its sends and receives with each peer. Guarded by the
// Section, in which operations get their numbers: so these have the journal's order.
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
  return await(call);
}

CUresult destroy(std::uint64_t number, bool abort) {
  wire::CommunicatorDestroy call{};
  call.communicator = number;
  call.abort = abort;
  Section section;
  given().erase(given().lower_bound({number, 0, 0}), given().lower_bound({number + 1, 0, 0}));
  return section.publish(call);
}

// The context that a stream handle is meant in, for as long as it lives.
struct InContext {
  explicit InContext(CUcontext context) : result(cuCtxPushCurrent_v2(context)) {}
  ~InContext() {
    CUcontext popped;
    if (!result) cuCtxPopCurrent_v2(&popped);
  }
  const CUresult result;
};

CUresult group(const CollectiveOperation* operations, const CUcontext* contexts, std::size_t count,
               const CollectiveRange* ranges, std::size_t range_count) {
  if (CUresult r = require(); r) return r;
  std::vector<CollectiveOperation> asked(operations, operations + count);
  std::vector<StreamRef> streams;
  for (std::size_t i = 0; i < count; ++i) {
    InContext inside(contexts[i]);
    if (inside.result) return inside.result;
    StreamRef stream;
    if (CUresult r = resolve_stream(reinterpret_cast<CUstream>(asked[i].stream), stream); r) return r;
    if (capture_open())
      if (CUresult r = refuse_in_capture(stream, "a collective of NCCL"); r) return r;
    asked[i].stream = stream.number;
    if (std::none_of(streams.begin(), streams.end(), [&](const StreamRef& s) { return s.number == stream.number; }))
      streams.push_back(stream);
  }
  for (std::size_t i = 0; i < range_count; ++i) {
    Place place;
    if (CUresult r = check_device(ranges[i].address, ranges[i].size, &place); r) return r;
    if (place.kind != Place::Kind::device) {
      log_once("collective on host memory", "a collective of NCCL on memory that is not a device's is not supported");
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  std::deque<ManagedUse> managed;
  for (const StreamRef& stream : streams) {
    ManagedUse& use = managed.emplace_back(stream);
    for (std::size_t i = 0; i < range_count; ++i) use.range(ranges[i].address, ranges[i].size);
    if (CUresult r = use.upload(); r) return r;
  }
  wire::CollectiveGroup call{};
  call.stream = asked[0].stream;
  call.operations = {asked.data(), static_cast<std::uint32_t>(asked.size() * sizeof asked[0])};
  Section section;  // held until it is noted: two threads' records keep the journal's order
  std::uint64_t seq = 0;
  give_numbers(asked);
  if (CUresult r = section.publish(call, &seq); r) {
    take_back(asked);
    return r;
  }
  for (const StreamRef& stream : streams) note_work(stream, seq);
  for (ManagedUse& use : managed) use.given(seq);
  return CUDA_SUCCESS;
}

void unsupported(const char* name) {
  report_unsupported(name);
  log_once(std::string("unsupported ") + name, "%s is not supported: it returns ncclInvalidUsage", name);
}

void complain(const char* key, const char* text) { log_once(key, "%s", text); }

}  // namespace

const CollectivesTable& collectives_table() {
  static const CollectivesTable table{sizeof(CollectivesTable), create, destroy, group, unsupported, complain,
                                      require};
  return table;
}

}  // namespace rgpu
