// CUDA arrays as the copy and texture code sees them (docs/developers/objects/arrays.md).
//
// Each array has memory: an allocation of the session's that holds its texels, level after level, rows at a pitch.
// Copies use this memory, and checkpoints and moves contain it alone; on a device whose arrays are separate memory the
// worker updates the one from the other.
#pragma once

#include <mutex>
#include <vector>

#include "handles.hpp"
#include "memory.hpp"

namespace rgpu {

// Position of the texels of one level in an array's memory.
struct ArrayLevel {
  std::uint64_t width = 0;   // bytes of a row
  std::uint64_t rows = 1, slices = 1;
  std::uint64_t pitch = 0;   // bytes from row to row
  std::uint64_t offset = 0;  // of the first texel
};

// A CUDA array, a mipmapped array, or one level of a mipmapped array, which has the mipmapped array's number.
struct Array : Object {
  explicit Array(Kind kind) : Object(kind) {}
  Context* context = nullptr;
  int device = 0;  // the session's number
  CUDA_ARRAY3D_DESCRIPTOR description{};
  std::uint64_t address = 0;  // of its memory
  std::uint64_t charged = 0;  // bytes that the device needs beside that memory
  std::vector<ArrayLevel> levels;
  unsigned first = 0;  // which level of the mipmapped array this is
  bool part = false;   // of a mipmapped array: cannot be destroyed
  std::mutex lock;     // guards `parts`
  std::vector<Array*> parts;  // levels that the program has requested

  const ArrayLevel& layout() const { return levels[first]; }
};

inline Array* find(CUarray h) { return static_cast<Array*>(find_object(h, Kind::array)); }
inline Array* find(CUmipmappedArray h) { return static_cast<Array*>(find_object(h, Kind::mipmapped_array)); }

// Bytes of a channel; 0 for a format that is not one of 8, 16 and 32 bits.
std::uint64_t channel_bytes(CUarray_format format);

// The side of a copy that is in an array: x and width count bytes.
struct ArrayBox {
  Array* array = nullptr;
  std::uint64_t x = 0, y = 0, z = 0, width = 0, height = 1, depth = 1;

  // Whether the box is inside the array, in whole elements.
  bool valid() const;
  std::uint64_t address() const;  // of its first byte in the array's memory
};

// Copies, in stream order, from the array to its memory, or from its memory to the array.
CUresult box_to_memory(const ArrayBox& box, const StreamRef& stream);
CUresult box_to_array(const ArrayBox& box, const StreamRef& stream);

// Destroys a context's texture objects, surface objects and arrays. Their work is complete.
void release_textures(Context& context);
void release_arrays(Context& context);

}  // namespace rgpu
