// The session as the rest of the shim sees it: facts, requirements, and the
// two ways to put a call into the journal (submit: not awaited; await: awaited).
//
// Rules for callers
//   * Every driver function except the few that work before cuInit begins with
//     `if (CUresult r = require(); r) return r;` (or `current(context)` of
//     handles.hpp, which includes it).
//   * No lock of the caller may be held across await(): the reader thread, and
//     threads that run host functions, publish as well.
//   * Handle numbers and addresses are chosen inside a Section (or submit_with),
//     so that the journal's order is the order in which they were made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "api.hpp"
#include "cuda_types.hpp"
#include "shim_link.hpp"
#include "wire.hpp"

namespace rgpu {

// ---------------------------------------------------------------- facts

// Above every CUdevice_attribute, so that no program can request it; 1: the device executes PTX and no machine code
// (rgpu/session/facts.py, ONLY_PTX).
inline constexpr int kOnlyPtxAttribute = 1 << 24;
// Bit n: kernels of the device reach the memory of the session's device n (PEERS); … also with atomics (PEER_ATOMICS).
inline constexpr int kPeersAttribute = (1 << 24) + 1, kPeerAtomicsAttribute = (1 << 24) + 2;
// Attributes of a device in a gang's list: the number of its member, and its number among that member's devices.
inline constexpr int kMemberAttribute = (1 << 24) + 3, kMemberDeviceAttribute = (1 << 24) + 4;

struct DeviceFacts {
  std::uint8_t uuid[16] = {};
  std::int32_t pci_domain = 0, pci_bus = 0, pci_device = 0;
  std::uint64_t total_memory = 0;  // bytes
  std::uint64_t range_base = 0, range_size = 0;
  std::string name;
  std::vector<std::pair<std::int32_t, std::int32_t>> attributes;  // sorted by CUdevice_attribute

  // The value of a CUdevice_attribute, or `otherwise` where the server did not report it.
  int attribute(int which, int otherwise = 0) const;
};

struct Facts {
  std::uint32_t driver_version = 0;  // as cuDriverGetVersion
  std::uint64_t session_number = 0;
  std::uint64_t quota = 0;          // bytes of each device
  std::uint64_t journal_limit = 0;  // bytes that may be unreleased before a publisher waits
  bool recover = false;
  std::string name;  // of the session
  std::vector<DeviceFacts> devices;
};

// ---------------------------------------------------------------- life

// The work of cuInit: connects to $RGPU_AGENT and reads the session's facts. Idempotent and thread-safe.
// CUDA_ERROR_NO_DEVICE (100) without an agent, CUDA_ERROR_SYSTEM_NOT_READY (802) when it cannot be reached,
// CUDA_ERROR_NOT_INITIALIZED (3) in a child forked after cuInit.
CUresult initialise();
bool initialised();      // this process (not a parent of it) has a session
const Facts& facts();    // only after initialise() succeeded
// The devices that the program may use: the session's, or in a gang those of the run's list, whose members are on
// several hosts. A process of a gang opens its session when it makes its first context: choose_device() opens the
// session of the member which has the device (a number in program_devices()). CUDA_ERROR_INVALID_DEVICE for another
// member's device after that.
const std::vector<DeviceFacts>& program_devices();
bool listed();  // this run is a gang's
bool other_member(int number);  // this process uses another member than the one that has the device
CUresult choose_device(int number);
// 3 before cuInit, 802 once the connection to the agent is lost, the sticky error once there is one.
CUresult require();
// Checks as require() does, but allows calls after a sticky error (context destruction, queries of state).
CUresult require_session();
void set_sticky(CUresult error);  // only the first one is kept

std::uint32_t thread_number();  // the client's number of the calling thread: 0, 1, …
std::uint64_t next_number();    // a new object number (>= FIRST_HANDLE); call it inside a Section

// ---------------------------------------------------------------- publishing

// A wire call, seen without its type.
struct CallView {
  std::uint16_t id = 0;
  bool reserved = false;  // may use the journal's reserved space (SEMANTICS 19)
  std::size_t args_size = 0;
  const void* call = nullptr;
  void (*write)(const void* call, std::uint8_t* to) = nullptr;
};

template <class C>
CallView view(const C& call) {
  return CallView{static_cast<std::uint16_t>(C::id), C::reserved, call.args_size(), &call,
                  [](const void* c, std::uint8_t* to) { static_cast<const C*>(c)->write(to); }};
}

// The worker's answer.
struct Answer {
  CUresult result = CUDA_SUCCESS;
  bool sticky = false;
  std::uint64_t seq = 0;
  std::vector<std::uint8_t> reply;      // encoded reply arguments
  std::uint64_t payload_size = 0;       // bytes of reply payload that the worker sent
};

// A payload prepared before the critical section: its CRC is computed, and a payload of more than 64 KiB is already in
// a bulk extent. Move-only; pass it to one call.
class Payload {
 public:
  Payload() = default;
  Payload(const void* data, std::size_t size);  // reads `data` now when size > 64 KiB, else when published
  ~Payload();
  Payload(Payload&& other) noexcept;
  Payload& operator=(Payload&&) = delete;
  // Makes a payload of rows that are not contiguous: `fill` writes `size` bytes to the given address.
  static Payload from(std::size_t size, const std::function<void(std::uint8_t* to)>& fill);
  // Reserves an extent of `size` bytes (> 64 KiB) without filling it: the caller fills it and sets `crc` before it is
  // published. `wait`: for journal space; without it the caller checks room_in_journal() first.
  static Payload reserve(std::size_t size, bool wait);
  std::uint8_t* place() const { return place_; }
  // The payload is in a bulk extent. Its journal space was waited for: make the Section with reserved = true.
  bool external() const { return external_; }

  std::size_t size = 0;
  std::uint32_t crc = 0;
  CUresult error = CUDA_SUCCESS;  // CUDA_ERROR_OUT_OF_MEMORY when no segment could be made

 private:
  friend class Section;
  std::uint8_t* extent(bool wait = true);  // address of `size` bytes; nullptr: `error` is the reason

  const std::uint8_t* data_ = nullptr;  // inline payload
  std::vector<std::uint8_t> own_;       // backing of data_ for `from` below 64 KiB
  bool external_ = false;
  std::uint32_t segment_ = 0;
  std::uint64_t offset_ = 0;
  std::uint8_t* place_ = nullptr;
};

// Whether `size` bytes may be published without waiting for journal space.
bool room_in_journal(std::uint64_t size);

struct Waiter;  // one awaited call; journal-internal

// The one critical section (SEMANTICS 3). Waits for journal space, then holds
// the journal's lock; publish() assigns the next seq. Never await inside.
class Section {
 public:
  explicit Section(bool reserved = false);
  ~Section();
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

  CUresult status() const { return status_; }  // not CUDA_SUCCESS: nothing can be published
  template <class C>
  CUresult publish(const C& call, std::uint64_t* seq = nullptr) {
    return publish_view(view(call), nullptr, nullptr, seq);
  }
  template <class C>
  CUresult publish(const C& call, Payload& payload, std::uint64_t* seq = nullptr) {
    return publish_view(view(call), &payload, nullptr, seq);
  }
  CUresult publish_view(const CallView& call, Payload* payload, Waiter* waiter, std::uint64_t* seq);

 private:
  CUresult write_record(const CallView& call, Payload* payload, Waiter* waiter, std::uint64_t* seq);

  CUresult status_ = CUDA_SUCCESS;
  bool locked_ = false, published_ = false;
};

CUresult submit_view(const CallView& call, const void* payload, std::size_t n, std::uint64_t* seq);
// `step` is called twice: (seq, false) inside the critical section, when the call was published, and (seq, true) after
// a successful answer, before the call returns to the program.
using Step = std::function<void(std::uint64_t seq, bool answered)>;
CUresult await_view(const CallView& call, Payload& payload, Answer& answer, void* destination, std::size_t capacity,
                    const Step& step);

// Publishes; returns before the worker has seen it. `seq`: its journal position.
template <class C>
CUresult submit(const C& call, const void* payload = nullptr, std::size_t n = 0, std::uint64_t* seq = nullptr) {
  return submit_view(view(call), payload, n, seq);
}

// Publishes with AWAITED, waits, copies the reply payload from the socket
// straight into destination (more than `capacity` bytes is an error), then
// publishes completed(seq) from reserved space. Returns the answer's result.
template <class C>
CUresult await(const C& call, const void* payload, std::size_t n, Answer& answer, void* destination = nullptr,
               std::size_t capacity = 0) {
  Payload ready(payload, n);
  return await_view(view(call), ready, answer, destination, capacity, nullptr);
}
template <class C>
CUresult await(const C& call) {
  Answer answer;
  return await(call, nullptr, 0, answer);
}

// One call whose fields (number, address) are chosen inside the critical
// section: `build(C&)` returns a CUresult; anything but success publishes nothing.
template <class C, class Build>
CUresult submit_with(Build&& build, std::uint64_t* seq = nullptr) {
  Section section;
  if (section.status()) return section.status();
  C call{};
  if (CUresult r = build(call); r) return r;
  return section.publish(call, seq);
}

// The thread that is told of an answer: that of the program's host functions, which may block, or one of ours.
enum class Notified : unsigned { program = 0, library = 1 };

// Publishes an AWAITED call that no thread waits for: `answered` runs on a thread of the shim's (never the reader), in
// the order of the answers, and with 802 when the connection to the agent is lost. It may publish, and block.
CUresult submit_notify(const CallView& call, std::function<void(const Answer&)> answered, std::uint64_t* seq,
                       Notified by = Notified::program);

// ---------------------------------------------------------------- progress

// The completion watermark that the worker pushed (SEMANTICS 1).
std::uint64_t published();                      // seq of the last published call, 0 before the first
bool all_complete(std::uint64_t up_to);         // every call <= up_to is complete
bool complete_on(std::uint64_t stream, std::uint64_t seq);  // that stream is complete up to seq
// No ordered work (launches, copies, memsets, …) of the session is unfinished, as far as is known here.
bool idle();
// The same of one device (the session's number, as below) …
bool idle_on(int device);
// … and whether all its calls <= seq are complete. kEveryDevice: of all.
inline constexpr int kEveryDevice = -1;
bool complete_on_device(int device, std::uint64_t seq);
// Call before the program is told that calls <= seq of the stream, or of all streams of the device, are complete.
void learned(std::uint64_t stream, std::uint64_t seq);
void learned_on(int device, std::uint64_t seq);
// Publishes completed(seq) from reserved space: the program has learned of that completion.
CUresult observed(std::uint64_t seq);
// The same alone: the routing library, which `observed` tells, knows of it already.
CUresult note_observation(std::uint64_t seq);
void flush();  // wakes the agent now (before a NOT_READY answer)

// ---------------------------------------------------------------- text that kernels print

// Writes the text that kernels printed to the program's standard output: before a call returns, or begins, that prints
// on a real driver. Costs one load where no kernel prints. await() calls it for every awaited call.
void print_device_text();

// ---------------------------------------------------------------- memory, for context and module code

struct Context;
struct Module;
// Waits for all work of its device, then frees the context's memory, streams and events on both sides. Call it before
// context_destroy is published.
CUresult release_context_objects(Context& context);
// Makes a module's variables known to pointer checks and UVA deduction, or removes them again.
void track_globals(const Module& module);
void untrack_globals(const Module& module);

// ---------------------------------------------------------------- reports for monitors

inline constexpr int kMaxDevices = 64;  // of a session
// Bytes of device memory that the program holds, by the session's number of the device: the bytes that cuMemGetInfo
// does not count as free. Call it whenever they change.
void report_used(int device, std::uint64_t bytes);
// A touch of managed memory begins to wait for the device (+1), or ends its wait (-1).
void report_managed(int waiting);
// A thread waited for the answer of a wire call, for so long.
void report_awaited(std::uint16_t call, std::uint64_t ns);
// The program called a function that is refused: named in `rgpu ps` as well.
void report_unsupported(const char* name);

// ---------------------------------------------------------------- log

// One line to stderr when RGPU_SHIM_LOG is set. printf format.
void log_line(const char* format, ...) __attribute__((format(printf, 1, 2)));
// One line to stderr always, once for each `key`.
void log_once(const std::string& key, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace rgpu
