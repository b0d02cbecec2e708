// The shim's one session: state shared by journal, agent link, progress and life. Internal to the core; other files
// include core.hpp.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "core.hpp"
#include "ring.hpp"

namespace rgpu {

// One awaited call. Filled in by the thread that reads the answer; `done` is set last.
struct Waiter {
  Answer* answer = nullptr;
  void* destination = nullptr;  // address for the reply payload
  std::size_t capacity = 0;
  std::function<void(const Answer&)> notify;  // set: no thread waits, the table owns the waiter
  Notified by = Notified::program;            // where `notify` is called
  std::atomic<std::uint32_t> done{0};
};

// A segment of shared memory that was offered to the agent.
struct Segment {
  std::uint32_t index = 0, kind = 0;
  std::uint64_t size = 0;
  std::uint8_t* map = nullptr;
  int fd = -1;                 // kept only where the memory will be reused
  std::uint64_t used = 0;      // bytes of records or extents in it
  unsigned pending = 0;        // bulk: extents whose record is not published yet
  bool current = true;         // more may be written to it
  bool offered = false;        // the agent has it already
  wire::SegmentHeader* header() const { return reinterpret_cast<wire::SegmentHeader*>(map); }
};

// Lock order: Session::section, then bulk_lock, then segments_lock; AnswerRing::reading
// is taken with no other lock held; waiters_lock and send_lock are leaves.
struct Session {
  enum class State { fresh, live, failed };
  std::mutex life_lock;  // guards the change from fresh to live
  std::atomic<State> state{State::fresh};
  std::atomic<bool> forked{false};  // a child forked after cuInit: nothing works here
  CUresult failure = CUDA_SUCCESS;  // why it is `failed`
  pid_t pid = 0;
  Facts facts;                       // the session's; in a gang only once `told`
  bool listing = false;              // of a gang's run; this and the list are set once, before the session is live
  Facts list;                        // of the run: facts common to all its devices, without the devices
  std::vector<DeviceFacts> listed;   // all devices of the run
  std::atomic<bool> told{false};     // `facts` may be read
  std::atomic<int> member{-1};       // whose devices this process uses; -1: none yet, and nothing can be published
  int chosen = -1;                   // the device of the list by which it was chosen; guarded by life_lock

  // the link
  int socket = -1, wake = -1;
  const volatile std::uint32_t* sleeping = nullptr;
  std::mutex send_lock;
  std::atomic<bool> gone{false};

  // the journal
  std::mutex section;                     // SEMANTICS 3: seq and publication
  std::atomic<std::uint64_t> last_seq{0};
  Segment* log = nullptr;                 // guarded by section
  std::mutex bulk_lock;
  Segment* bulk = nullptr;                // guarded by bulk_lock
  std::mutex segments_lock;               // guards the fields below, up to preallocated_wanted
  std::condition_variable released;
  std::unordered_map<std::uint32_t, std::unique_ptr<Segment>> segments;
  std::vector<std::unique_ptr<Segment>> preallocated;
  std::uint64_t unreleased = 0;           // bytes used in segments that the agent holds
  std::uint32_t kept_fds = 0;
  unsigned preallocating = 0;                // segments that are being made ahead
  unsigned preallocated_wanted = 0;          // bulk segments made ahead: 0 before one was needed
  std::condition_variable preallocated_low;  // with segments_lock: one was taken
  std::atomic<std::uint32_t> next_index{0};

  // answers
  AnswerRing ring;
  std::mutex waiters_lock;
  std::unordered_map<std::uint64_t, Waiter*> waiters;

  std::atomic<int> sticky{0};
  std::atomic<std::uint64_t> next_number{wire::kFirstHandle};
};

Session& session();

// agent_link.cpp
// Makes permanent memory: allocated, touched and sealed, so that neither side can die of SIGBUS.
bool make_memory(Segment& segment);
// Writes the segment's header, and offers it to the agent. False: it is gone.
bool offer_segment(Session& s, Segment& segment, std::uint64_t first_seq);
void drop_memory(Segment& segment);
// A segment made ahead, or nullptr.
std::unique_ptr<Segment> take_preallocated(Session& s, std::uint32_t kind, std::uint64_t size);
void start_preallocator(Session& s);  // what makes bulk segments ahead

CUresult connect_agent(Session& s);           // HELLO, WELCOME; starts the reader
CUresult fetch_list(Session& s);              // LIST, LISTED: the devices of a gang's run; no session
bool send_message(Session& s, std::uint32_t type, const void* body, std::size_t size, int fd = -1);
bool send_message(Session& s, std::uint32_t type, const void* body, std::size_t size, const std::vector<int>& fds);
void take_watermark(const std::uint8_t* at, const std::uint8_t* end);  // parses a WATERMARK's body
void wake_agent(Session& s);                  // after a publication
void lose_agent(Session& s);                  // every waiter returns 802
bool parse_facts(const std::uint8_t* body, std::size_t size, Facts& facts);

// journal.cpp
// While an object of this class exists, its thread publishes from reserved space (SEMANTICS 19), because other threads
// or the stream wait for these calls. Where the thread may wait, wait for space before that.
class ReservedSpace {
 public:
  ReservedSpace();
  ~ReservedSpace();
  ReservedSpace(const ReservedSpace&) = delete;

 private:
  const bool before_;
};
void release_segment(Session& s, std::uint32_t index);
void wait_for_space(Session& s, bool reserved);
CUresult bulk_extent(Session& s, std::uint64_t size, Segment*& segment, std::uint64_t& offset);
void extent_published(Session& s, std::uint32_t index, std::uint64_t size);

// answers.cpp
bool add_waiter(Session& s, std::uint64_t seq, Waiter* waiter);
Waiter* find_waiter(Session& s, std::uint64_t seq);
Waiter* take_waiter(Session& s, std::uint64_t seq);
bool start_callbacks(Notified by);            // the thread that Waiter::notify runs on
void finish_waiter(Waiter* waiter);           // the answer is in place
// Waits for the answer of a call, unless it is here, and counts that time (report_awaited).
void wait_for_answer(Waiter& waiter, std::uint16_t call);
// Waits for the answer of an awaited call that is published as `seq`, and handles it as await() does.
CUresult collect(std::uint16_t call, Waiter& waiter, std::uint64_t seq, const Step& step = nullptr);
void fail_waiters(Session& s, CUresult result);

// progress.cpp
void watermark(std::uint64_t all_done, const std::vector<std::pair<std::uint64_t, std::uint64_t>>& streams);
// Ordered work was given to a stream of a device; `blocking`: it orders with the device's legacy stream.
void given(std::uint64_t stream, std::uint64_t seq, int device, bool blocking);
// Call `seq` of a stream waits until another is complete up to a call.
void waits_for(std::uint64_t stream, std::uint64_t seq, std::uint64_t other, std::uint64_t up_to);
std::uint64_t last_given(std::uint64_t stream);  // of a legacy stream; of others 0 once known complete

// Called when completions have just been recorded as observed, before the program is told: waits for the bytes of
// copies to pinned memory (downloads.cpp), copies back the bytes that kernels wrote into mapped host memory
// (mirrors.cpp), and makes deferred frees whose work is complete (pool.cpp).
void after_observation();
void bring_back_host_memory();
// Called before a wait, and by a query of work that is under way: sends a word of mapped memory that a kernel may poll
// (mirrors.cpp). No lock held.
void send_polled_words();
// Kernels may be using mapped host memory, or copies be in transit. Cheap, as is bring_back_host_memory() where it is
// false.
bool host_memory_in_use();
void free_deferred();

// device_text.cpp
// Takes a piece of text that kernels printed: u64 position, bytes. False: the piece is impossible.
bool take_device_text(const std::uint8_t* at, const std::uint8_t* end);
void print_last_device_text();  // at the process's end
void forget_device_text();      // in a forked child: the text is the parent's

// report.cpp
// Gives the agent the page of bytes used, and the names of refused functions called so far.
CUresult open_report(Session& s);

// fork.cpp
bool address_ranges_reserved(unsigned devices, std::string& why);

}  // namespace rgpu
