// The shim's pure parts with C names, for the tests.
#include "allocator.hpp"
#include "crc32.hpp"

using namespace rgpu;

extern "C" {

Allocator* allocator_new(std::uint64_t base, std::uint64_t size, std::uint64_t quota, std::uint64_t largest) {
  return new Allocator(base, size, quota, 2u << 20, 512, largest);
}
void allocator_delete(Allocator* a) { delete a; }

// Pieces go to `ranges` (address, size pairs), their number to *count. 0: no room.
std::uint64_t allocator_allocate(Allocator* a, std::uint64_t size, std::uint64_t alignment, std::uint64_t* ranges,
                                 std::uint64_t* count) {
  std::vector<Range> map;
  auto address = a->allocate(size, map, alignment);
  *count = map.size();
  for (std::size_t i = 0; i < map.size() && i < 64; ++i) ranges[2 * i] = map[i].address, ranges[2 * i + 1] = map[i].size;
  return address.value_or(0);
}
int allocator_free(Allocator* a, std::uint64_t address, std::uint64_t* ranges, std::uint64_t* count) {
  std::vector<Range> unmap;
  const bool freed = a->free(address, unmap);
  *count = unmap.size();
  for (std::size_t i = 0; i < unmap.size() && i < 64; ++i) ranges[2 * i] = unmap[i].address, ranges[2 * i + 1] = unmap[i].size;
  return freed;
}
std::uint64_t allocator_base(Allocator* a, std::uint64_t address) {
  auto found = a->find(address);
  return found ? found->address : 0;
}
std::uint64_t allocator_available(Allocator* a) { return a->available(); }
int allocator_consistent(Allocator* a) { return a->consistent(); }
std::uint32_t crc(std::uint32_t before, const void* data, std::uint64_t size) { return crc32(before, data, size); }

}
