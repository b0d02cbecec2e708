// The shim's slimming with a C name, for the tests and for bench/remote/module_sizes.py.
#include <cstring>

#include "slim.hpp"

extern "C" {

// What goes to the server in place of the image at `data`: its size, the bytes in `out` (room for `size`).
// flags: 1 the device executes only PTX, 2 PTX is to be compiled.
std::uint64_t slim_image(const void* data, std::uint64_t size, int major, int minor, int flags, void* out) {
  rgpu::module_binary::Binary image;
  if (rgpu::module_binary::find(data, &image) != rgpu::module_binary::Verdict::ok || image.size > size) return 0;
  const std::string made =
      rgpu::module_binary::slim(image, {.major = major, .minor = minor, .only_ptx = (flags & 1) != 0, .force_ptx = (flags & 2) != 0});
  if (made.empty()) {
    std::memcpy(out, image.data, image.size);
    return image.size;
  }
  std::memcpy(out, made.data(), made.size());
  return made.size();
}

}
