// Pinned ranges as pinned.cpp and mirrors.cpp share them.
//
// Lock order: Pinned::lock (of several ranges by address), the journal's section, Pins::lock.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <vector>

#include "memory.hpp"

namespace rgpu {

// A range of bytes being sent to a mirror.
struct Upload {
  std::uint64_t stream = 0, seq = 0, from = 0, to = 0;
  std::uint64_t context = 0;  // the stream's, by its number
};

// The last call of a stream that may write a mirror. It is ordered after all uploads up to `behind`.
struct Writer {
  std::uint64_t seq = 0, behind = 0;
};

struct Pinned {
  std::uint64_t address = 0, size = 0;       // in the program
  std::atomic<std::uint64_t> mirror{0};      // address for kernels: the same, but for registered memory; 0: none yet
  unsigned flags = 0;
  Context* context = nullptr;
  bool registered = false;
  std::uint64_t id = 0;
  std::mutex lock;                           // guards the fields below
  bool ended = false;                        // freed: its memory may be unmapped
  std::vector<std::uint8_t> twin;            // empty until a kernel is given the range
  std::map<std::uint64_t, Writer> writers;   // by stream
  unsigned launching = 0;                    // calls that will be writers, not published yet
  std::vector<Upload> uploads;               // not known to be complete, in their order
  std::uint64_t uploaded = 0;                // the last one of all
};

struct Pins {
  std::shared_mutex lock;
  std::map<std::uint64_t, std::shared_ptr<Pinned>> ranges;
  std::map<std::uint64_t, std::shared_ptr<Pinned>> registered;  // those with a mirror, by its address
  Allocator addresses{kPinnedFirst + member_number() * part_of(kPinnedRoom, member_count()), part_of(kPinnedRoom, member_count()),
                      kPinnedSize, kPage, kPage, kPinnedSize};
  std::map<Context*, std::uint64_t> readers;  // streams of our own for reading mirrors
  std::set<std::uint64_t> lost;               // streams destroyed with unfinished work
  std::uint64_t next_id = 1ull << 40;
  std::atomic<std::size_t> mirrors{0};
  std::atomic<std::size_t> in_use{0};  // writers and calls that will be: not yet copied back
};

Pins& pins();
std::shared_ptr<Pinned> range_of(std::uint64_t address);         // by the program's address
std::shared_ptr<Pinned> range_of_mirror(std::uint64_t address);  // by the address for kernels

}  // namespace rgpu
