// The address allocator of one range: pure bookkeeping, no locks, no calls.
//
// Physical memory is mapped in granules of 2 MiB and counted against a quota.
// An allocation of more than half a granule has granules of its own; smaller
// ones share granules, at multiples of 512 bytes, best fit. A granule without
// allocations is unmapped at once, so that
//     free memory = quota - mapped granules
// is exact: that much can be allocated in granules. Addresses are the lowest
// that fit; one is handed out again only after free() of it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace rgpu {

struct Range {
  std::uint64_t address = 0, size = 0;
  bool operator==(const Range&) const = default;
};

class Allocator {
 public:
  // The range [base, base+size) and the quota in bytes; all are rounded down to whole granules.
  Allocator(std::uint64_t base, std::uint64_t size, std::uint64_t quota, std::uint64_t granule = 2u << 20,
            std::uint64_t alignment = 512, std::uint64_t largest_mapping = 1u << 30);

  // An address for `size` > 0 bytes; nothing when the quota or the range is exhausted. `map` gets the ranges that must
  // be mapped first, in pieces of at most `largest_mapping` bytes. `alignment`: a power of two up to a granule; 0: the
  // allocator's own.
  std::optional<std::uint64_t> allocate(std::uint64_t size, std::vector<Range>& map, std::uint64_t alignment = 0);
  // Frees an address that allocate() returned; false for any other address. `unmap` gets the pieces that are not needed
  // any more, divided as they were mapped.
  bool free(std::uint64_t address, std::vector<Range>& unmap);

  // The allocation that holds an address: its base and the size asked for.
  std::optional<Range> find(std::uint64_t address) const;
  std::uint64_t quota() const { return quota_; }
  std::uint64_t mapped() const { return mapped_; }
  std::uint64_t available() const { return quota_ - mapped_ - charged_; }
  // Bytes of the quota that are used outside of this range; false when less than `size` is available.
  bool charge(std::uint64_t size) { return size <= available() && (charged_ += size, true); }
  void refund(std::uint64_t size) { charged_ -= size; }
  std::size_t count() const { return allocations_.size(); }
  // Checks every invariant of the bookkeeping; for tests.
  bool consistent() const;

 private:
  struct Allocation {
    std::uint64_t size;     // as asked for
    std::uint64_t reserved; // bytes it takes: granules, or a part of a shared one
    bool shared;
  };
  using Blocks = std::map<std::uint64_t, std::uint64_t>;  // address -> size

  std::optional<std::uint64_t> take_granules(std::uint64_t size);
  void give_granules(std::uint64_t address, std::uint64_t size);
  std::vector<Range> pieces(std::uint64_t address, std::uint64_t size) const;
  void add_block(std::uint64_t address, std::uint64_t size);
  void remove_block(Blocks::iterator block);
  // The smallest free block that holds `size` bytes at that alignment.
  std::set<std::pair<std::uint64_t, std::uint64_t>>::iterator best_fit(std::uint64_t size, std::uint64_t alignment) const;
  std::uint64_t granule_of(std::uint64_t address) const { return address - (address - base_) % granule_; }

  const std::uint64_t base_, size_, quota_, granule_, alignment_, largest_;
  std::uint64_t mapped_ = 0, charged_ = 0;
  Blocks holes_;                                    // unmapped address space
  Blocks blocks_;                                   // free parts of shared granules
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // (size, address) of blocks_
  std::map<std::uint64_t, Allocation> allocations_;
};

}  // namespace rgpu
