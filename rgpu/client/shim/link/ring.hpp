// The answer ring: shared memory through which answers and watermarks are received (docs/developers/links/shim-link.md,
// "The answer ring"). One thread at a time reads it: a waiting thread, while it waits, else the reader thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>

#include "copy_pool.hpp"

namespace rgpu {

struct Session;
struct Waiter;

struct AnswerRing {
  const std::uint8_t* page = nullptr;  // the agent's: header, `written`
  const std::uint8_t* data = nullptr;  // the messages, read-only
  std::uint64_t size = 0;              // bytes of data
  std::uint8_t* own = nullptr;         // the shim's page: `read`, `attending`
  int doorbell = -1;                   // the agent writes it when no thread attends

  std::mutex reading;  // its holder reads the ring, and owns the fields down to `area_size`
  std::uint64_t read = 0;
  bool broken = false;

  // the answer whose pieces are being received
  bool passing = false;
  Waiter* waiter = nullptr;  // nullptr: no thread awaits it
  std::uint64_t seq = 0;
  std::int32_t result = 0;
  std::uint32_t flags = 0, reply_left = 0;
  std::uint64_t payload = 0;  // bytes received
  std::deque<CopyJob> copies;  // of its pieces, into the waiter's memory

  // the worker's memory for long answers, read-only
  const std::uint8_t* area = nullptr;
  std::uint32_t area_number = 0;
  std::atomic<std::uint64_t> area_size{0};  // 0: there is none

  // for the publishing thread, which holds the session's section
  std::uint64_t stamps = 0, stamped = 0;  // number of stamps, and time of the last one in ns
};

// Makes the shim's page and the doorbell; false: no ring is requested.
bool prepare_ring(AnswerRing& ring, int& page_fd);
// Maps the ring behind the agent's page. `size` 0: the agent has none.
bool map_ring(AnswerRing& ring, int agent_page, std::uint64_t offset, std::uint64_t size);
void drop_ring(AnswerRing& ring);
// Maps an area in place of the previous one, which no message names any more. False: it cannot be used.
bool map_area(AnswerRing& ring, int fd, std::uint32_t number, std::uint64_t size);
// Records the time of call `seq` before it is published: now and then, so that the agent can detect calls that it found
// late.
void stamp_call(AnswerRing& ring, std::uint64_t seq);
// Returns when no bytes are being copied into a waiter's memory. `reading` held.
void finish_copies(AnswerRing& ring);

// Reads the ring until the answer is there, for about the time that a sleep would cost. If it returns without the
// answer, sleep on waiter.done.
void attend(Session& s, Waiter& waiter);
// Called by the reader thread: reads all messages. False: the ring is broken.
bool read_ring(Session& s);

}  // namespace rgpu
