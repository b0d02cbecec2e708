#include "allocator.hpp"

#include <algorithm>

namespace rgpu {

Allocator::Allocator(std::uint64_t base, std::uint64_t size, std::uint64_t quota, std::uint64_t granule,
                     std::uint64_t alignment, std::uint64_t largest_mapping)
    : base_(base), size_(size - size % granule), quota_(quota - quota % granule), granule_(granule),
      alignment_(alignment), largest_(largest_mapping) {
  holes_.emplace(base_, size_);
}

std::optional<std::uint64_t> Allocator::allocate(std::uint64_t size, std::vector<Range>& map, std::uint64_t alignment) {
  if (!size || size > quota_) return std::nullopt;
  const bool shared = size <= granule_ / 2;
  alignment = std::max(alignment, alignment_);
  const std::uint64_t unit = shared ? alignment : granule_;  // so that the last granule is not shared
  const std::uint64_t reserved = (size + unit - 1) / unit * unit;
  std::uint64_t address;
  if (!shared) {
    if (reserved > available()) return std::nullopt;
    auto found = take_granules(reserved);
    if (!found) return std::nullopt;
    address = *found;
    map = pieces(address, reserved);
  } else {
    auto fit = best_fit(reserved, alignment);
    if (fit == by_size_.end()) {
      if (granule_ > available()) return std::nullopt;
      auto found = take_granules(granule_);
      if (!found) return std::nullopt;
      map = pieces(*found, granule_);
      add_block(*found, granule_);
      fit = best_fit(reserved, alignment);
    }
    const auto [block_size, block] = *fit;
    address = (block + alignment - 1) / alignment * alignment;
    remove_block(blocks_.find(block));
    const std::uint64_t end = block + block_size;
    if (address > block) add_block(block, address - block);
    if (end > address + reserved) add_block(address + reserved, end - address - reserved);
  }
  allocations_.emplace(address, Allocation{size, reserved, shared});
  return address;
}

std::set<std::pair<std::uint64_t, std::uint64_t>>::iterator Allocator::best_fit(std::uint64_t size,
                                                                                std::uint64_t alignment) const {
  auto fit = by_size_.lower_bound({size, 0});
  while (fit != by_size_.end() && (fit->second + alignment - 1) / alignment * alignment + size > fit->second + fit->first)
    ++fit;
  return fit;
}

bool Allocator::free(std::uint64_t address, std::vector<Range>& unmap) {
  auto it = allocations_.find(address);
  if (it == allocations_.end()) return false;
  const Allocation allocation = it->second;
  allocations_.erase(it);
  if (!allocation.shared) {
    unmap = pieces(address, allocation.reserved);
    give_granules(address, allocation.reserved);
    return true;
  }
  // Joins with free neighbours, never across the granule's edge.
  const std::uint64_t granule = granule_of(address);
  std::uint64_t from = address, size = allocation.reserved;
  auto after = blocks_.lower_bound(address);
  if (after != blocks_.begin()) {
    auto before = std::prev(after);
    if (before->first >= granule && before->first + before->second == address) {
      from = before->first;
      size += before->second;
      remove_block(before);
    }
  }
  if (after != blocks_.end() && after->first == address + allocation.reserved && after->first < granule + granule_) {
    size += after->second;
    remove_block(after);
  }
  if (size == granule_) {
    unmap = {Range{from, granule_}};
    give_granules(from, granule_);
  } else {
    add_block(from, size);
  }
  return true;
}

std::optional<Range> Allocator::find(std::uint64_t address) const {
  auto it = allocations_.upper_bound(address);
  if (it == allocations_.begin()) return std::nullopt;
  --it;
  if (address - it->first >= it->second.size) return std::nullopt;
  return Range{it->first, it->second.size};
}

std::optional<std::uint64_t> Allocator::take_granules(std::uint64_t size) {
  for (auto it = holes_.begin(); it != holes_.end(); ++it) {
    if (it->second < size) continue;
    const auto [address, room] = *it;
    holes_.erase(it);
    if (room > size) holes_.emplace(address + size, room - size);
    mapped_ += size;
    return address;
  }
  return std::nullopt;
}

void Allocator::give_granules(std::uint64_t address, std::uint64_t size) {
  mapped_ -= size;
  auto after = holes_.lower_bound(address);
  if (after != holes_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == address) {
      address = before->first;
      size += before->second;
      holes_.erase(before);
    }
  }
  if (after != holes_.end() && address + size == after->first) {
    size += after->second;
    holes_.erase(after);
  }
  holes_.emplace(address, size);
}

std::vector<Range> Allocator::pieces(std::uint64_t address, std::uint64_t size) const {
  std::vector<Range> found;
  for (std::uint64_t done = 0; done < size; done += largest_)
    found.push_back({address + done, size - done < largest_ ? size - done : largest_});
  return found;
}

void Allocator::add_block(std::uint64_t address, std::uint64_t size) {
  blocks_.emplace(address, size);
  by_size_.emplace(size, address);
}

void Allocator::remove_block(Blocks::iterator block) {
  by_size_.erase({block->second, block->first});
  blocks_.erase(block);
}

bool Allocator::consistent() const {
  // Holes, blocks and allocations tile the range without overlap.
  std::map<std::uint64_t, std::uint64_t> tiles = holes_;
  std::uint64_t used = 0, holes = 0;
  for (auto [address, size] : holes_) holes += size;
  for (auto [address, size] : blocks_) {
    if (!tiles.emplace(address, size).second || granule_of(address) != granule_of(address + size - 1)) return false;
    if (size == granule_ || !by_size_.contains({size, address})) return false;
  }
  for (auto& [address, allocation] : allocations_) {
    if (!tiles.emplace(address, allocation.reserved).second || address % alignment_ || !allocation.size ||
        allocation.size > allocation.reserved)
      return false;
    used += allocation.reserved;
  }
  for (auto [size, address] : by_size_) used += size;
  std::uint64_t at = base_;
  for (auto [address, size] : tiles) {
    if (address != at) return false;
    at += size;
  }
  return at == base_ + size_ && used == mapped_ && holes + mapped_ == size_ && mapped_ + charged_ <= quota_ &&
         by_size_.size() == blocks_.size();
}

}  // namespace rgpu
