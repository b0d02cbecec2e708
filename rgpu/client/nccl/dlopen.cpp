// dlopen in front of the C library's: a program that opens NCCL by a path (as CuPy does, and programs that search
// nvidia/nccl/lib) gets this library, which is preloaded, so that its symbols are found first.
#include <dlfcn.h>
#include <unistd.h>

#include <cstring>
#include <string_view>

#include "api.hpp"

namespace rgpu::nccl {
namespace {

using Open = void *(*)(const char *, int);

Open c_library() {
  static const auto found = reinterpret_cast<Open>(dlsym(RTLD_NEXT, "dlopen"));
  return found;
}

// libnccl.so, libnccl.so.2, libnccl.so.2.28.9: not its plugins, which have other names.
bool names_nccl(std::string_view file) {
  constexpr std::string_view name = "libnccl.so";
  file.remove_prefix(file.rfind('/') + 1);  // npos + 1 is 0
  return file.starts_with(name) && (file.size() == name.size() || file[name.size()] == '.');
}

// The path of this library; `file` unchanged where it is a path at which no file exists.
const char *instead_of(const char *file) {
  Dl_info mine;
  if (std::strchr(file, '/') && access(file, F_OK)) return file;
  return dladdr(reinterpret_cast<const void *>(&names_nccl), &mine) ? mine.dli_fname : file;
}

}  // namespace
}  // namespace rgpu::nccl

// The C library's function is called last, so that the call is a jump: the loader takes the caller from the return
// address, and searches that caller's RUNPATH.
extern "C" NCCL_API void *dlopen(const char *file, int mode) {
  using namespace rgpu::nccl;
  if (file && names_nccl(file)) file = instead_of(file);
  return c_library()(file, mode);
}
