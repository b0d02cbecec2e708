// Device and pinned memory as the copy, launch and pointer code sees it. Internal to the core.
#pragma once

#include <memory>
#include <optional>
#include <shared_mutex>

#include "allocator.hpp"
#include "handles.hpp"
#include "routed.hpp"

namespace rgpu {

// The memory that a pointer of the program's points into.
struct Place {
  enum class Kind {
    host,     // pageable memory of the program (or anything else that is not ours)
    device,   // an allocation, or a module's variable
    pinned,   // cuMemHostAlloc, or the device address of registered memory: has a mirror at this address in the worker
    registered,  // cuMemHostRegister: the program's memory, by its own address
    invalid,  // in a device range, but in no allocation
  } kind = Kind::host;
  std::uint64_t base = 0, size = 0;  // of the allocation, variable or pinned range
  int device = 0;
  Context* context = nullptr;
  unsigned flags = 0;                // of pinned memory
  std::uint64_t id = 0;              // CU_POINTER_ATTRIBUTE_BUFFER_ID
  bool managed = false;              // … of the device, and of the program (managed.hpp)
  std::uint64_t host = 0;            // memory of the CPU: the program's address of the byte at `base`
  std::uint64_t mirror = 0;          // … and the address for kernels; 0: not requested yet
  bool exportable = false;           // from cuMemAlloc: other processes may open it

  bool holds(std::uint64_t address, std::uint64_t n) const { return address >= base && n <= size - (address - base); }
};

// The bytes of a device's memory that the session may use.
std::uint64_t facts_quota(const DeviceFacts& device);

Place place_of(std::uint64_t address);
// Checks that `n` bytes from the address on are device memory: CUDA_ERROR_INVALID_VALUE otherwise.
CUresult check_device(std::uint64_t address, std::uint64_t n, Place* place = nullptr);
// … `height` rows of `width` bytes, `pitch` apart.
CUresult check_device_rows(std::uint64_t address, std::uint64_t pitch, std::uint64_t width, std::uint64_t height,
                           Place* place = nullptr);

// `page`: for managed memory: the alignment, and no other allocation lies in its pages. `pooled`: it has no handle for
// other processes.
CUresult allocate_device(Context& context, std::uint64_t size, std::uint64_t& address, std::uint64_t page = 0,
                         bool pooled = false);
// Waits if work is unfinished (SEMANTICS 2).
CUresult free_device(std::uint64_t address);
// Makes the allocation invisible to the program, without freeing it. False: not an allocation's base.
bool hide_device(std::uint64_t address);
// Frees a hidden allocation of which all work is known to be complete.
CUresult free_hidden(std::uint64_t address);

// Counts memory that is not in the allocator's range (vmm.cpp) against the quota of a device of the session. False:
// less is left.
bool charge_quota(int device, std::uint64_t size);
void refund_quota(int device, std::uint64_t size);

// ---------------------------------------------------------------- memory shared by the processes of a run

// Takes a slot on the run's page, once the session's facts are known.
CUresult join_run();
// Reports the bytes of a device that this process uses to the run's other processes.
void share_used(int device, std::uint64_t bytes);
// Bytes of a device that all processes of the run use, of which this one uses `own`.
std::uint64_t used_by_run(int device, std::uint64_t own);

// virtual/vmm_addresses.cpp
Place virtual_place(std::uint64_t address);  // Kind::host when nothing is mapped there by cuMemMap

// Waits for all work of the context's device, as cuCtxSynchronize does.
CUresult wait_for_device(const Context& context);
// … by the session's number of the device, which also one without a context has. kEveryDevice: all of them. A device
// known to be idle is not waited for: that suffices before a free, which a replay applies after all else; where other
// work follows, `told` records the wait in the journal.
CUresult wait_for_device_number(int device, bool told = false);
// The device, by the session's number, whose range an address lies in; kEveryDevice for none.
int device_of(std::uint64_t address);

// pool.cpp
// Frees an allocation when all work published so far is complete.
void free_when_complete(std::uint64_t address);
// Waits for the work that deferred frees of the device's memory wait for; false: none of it was freed.
bool reclaim_deferred(int device);

// pinned.cpp
Place pinned_place(std::uint64_t address);  // Kind::host when it is not pinned memory
void release_pinned(Context& context);
// Host bytes of pinned memory are about to be read for a copy to the device: waits for all work that may still write
// them (SEMANTICS 6).
CUresult finish_writers_of_source(std::uint64_t address, std::uint64_t size);
// … or about to be written by a copy from the device: what kernels before it wrote must not be copied back after it.
CUresult finish_writers_of_destination(std::uint64_t address);
bool any_pinned();  // cheap: is there any memory with a mirror?

// mirrors.cpp
struct Pinned;
// One kernel or memset on a stream that may read and write the pinned ranges that the addresses point into.
class MirrorUse {
 public:
  MirrorUse(const StreamRef& stream, const std::vector<std::uint64_t>& addresses);
  ~MirrorUse();
  MirrorUse(const MirrorUse&) = delete;
  CUresult upload();            // before the call is published: sends the CPU's changes to the mirrors, in stream order
  void given(std::uint64_t seq);  // it has been published

 private:
  struct Used {
    std::shared_ptr<Pinned> range;
    std::uint64_t behind = 0;
    bool begun = false;
  };
  const StreamRef& stream_;
  std::vector<Used> used_;
};

// stream_memory.cpp: operations on words of memory. Checks their form only: addresses are looked up when they are given
// to a stream.
CUresult check_operations(unsigned n, const CUstreamBatchMemOpParams* operations, unsigned flags);
bool words_there(const std::vector<CUstreamBatchMemOpParams>& operations);  // whether they are device memory

// hostfn.cpp
void wait_host_functions();

// Publishes a call that is ordered work of a stream.
template <class C>
CUresult submit_work(const StreamRef& stream, const C& call, Payload& payload, std::uint64_t* seq_out = nullptr) {
  if (payload.error) return payload.error;
  Section section(payload.external());
  std::uint64_t seq = 0;
  if (CUresult r = section.publish(call, payload, &seq); r) return r;
  note_work(stream, seq);
  if (seq_out) *seq_out = seq;
  return CUDA_SUCCESS;
}
template <class C>
CUresult submit_work(const StreamRef& stream, const C& call, std::uint64_t* seq_out = nullptr) {
  Payload none;
  return submit_work(stream, call, none, seq_out);
}

// Awaits a call that completes in stream order: its answer means that the stream has reached it.
template <class C>
CUresult await_work(const StreamRef& stream, const C& call, void* destination = nullptr, std::size_t capacity = 0,
                    std::uint64_t* received = nullptr) {
  Answer answer;
  Payload none;
  CUresult r = await_view(view(call), none, answer, destination, capacity, [&](std::uint64_t seq, bool answered) {
    if (answered)
      learned(stream.number, seq);
    else
      note_work(stream, seq);
  });
  if (received) *received = answer.payload_size;
  return r;
}

}  // namespace rgpu
