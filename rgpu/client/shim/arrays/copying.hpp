// One copy of rows: the common form of all cuMemcpy functions.
#pragma once

#include "handles.hpp"

namespace rgpu {

// Source or destination of a copy: `type` is the type that the call gives.
struct CopyEnd {
  CUmemorytype type = CU_MEMORYTYPE_UNIFIED;
  std::uint64_t address = 0;
  std::uint64_t pitch = 0;
  bool host = false;  // set by resolve(): the bytes are the program's own memory
  int device = 0;     // … or this device's, by the session's number
  bool managed = false;
};

struct Copy {
  CopyEnd destination, source;
  std::uint64_t width = 0, height = 1;
  bool packed(const CopyEnd& end) const { return height <= 1 || end.pitch == width; }
};

// `blocking`: a call without "Async". When such a copy to the device returns, the program may start work that reads the
// copied bytes on any stream: the copy's end is an observed completion (SEMANTICS 1), so it is awaited.
CUresult run_copy(Copy& copy, CUstream stream, bool blocking);

}  // namespace rgpu
