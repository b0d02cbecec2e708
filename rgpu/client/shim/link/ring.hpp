// The answer ring: shared memory by which answers and watermarks come
// (docs/developers/links/shim-link.md, "The answer ring"). One thread at a time reads it: the
// one that waits, while it waits, else the reader thread.
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
  int doorbell = -1;                   // the agent writes it when nobody attends

  std::mutex reading;  // who holds it reads the ring, and everything below is its
  std::uint64_t read = 0;
  bool broken = false;

  // the answer whose pieces are coming
  bool passing = false;
  Waiter* waiter = nullptr;  // nullptr: nobody awaits it
  std::uint64_t seq = 0;
  std::int32_t result = 0;
  std::uint32_t flags = 0, reply_left = 0;
  std::uint64_t payload = 0;  // bytes that came
  std::deque<CopyJob> copies;  // of its pieces, into the waiter's memory

  // the worker's memory for long answers, read-only
  const std::uint8_t* area = nullptr;
  std::uint32_t area_number = 0;
  std::atomic<std::uint64_t> area_size{0};  // 0: there is none

  // who publishes calls: the session's section is held
  std::uint64_t stamps = 0, stamped = 0;  // how many, and ns when the last was written
};

// Makes the shim's page and the doorbell; false: no ring is asked for.
bool prepare_ring(AnswerRing& ring, int& page_fd);
// Takes over the ring behind the agent's page. `size` 0: the agent has none.
bool map_ring(AnswerRing& ring, int agent_page, std::uint64_t offset, std::uint64_t size);
void drop_ring(AnswerRing& ring);
// Maps an area in the place of the one before, which nothing names any more. False: it cannot be used.
bool map_area(AnswerRing& ring, int fd, std::uint32_t number, std::uint64_t size);
// Notes, before call `seq` is published, when that is: now and then, so that the agent knows of calls that it found late.
void stamp_call(AnswerRing& ring, std::uint64_t seq);
// Nothing is being copied into a waiter's memory when it returns. `reading` held.
void finish_copies(AnswerRing& ring);

// Reads the ring while the answer is not there, for as long as a sleep would
// cost. Returns with or without it: then sleep on waiter.done.
void attend(Session& s, Waiter& waiter);
// The reader thread's turn: everything that is there. False: the ring is broken.
bool read_ring(Session& s);

}  // namespace rgpu
