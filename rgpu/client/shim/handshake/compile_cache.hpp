// Cache on disk of NVRTC's compilations: a driver keeps one for NVRTC, which accesses it through a private table.
//
// cuDNN compiles a kernel for each length of keys that an attention uses, mostly from the same source: with the cache
// that takes a few milliseconds instead of 0.3 s. The files: docs/developers/shim.md.
#pragma once

#include <cstdint>

namespace rgpu::compile_cache {

// Functions as NVRTC 13.0 calls them; 0: success. `kind`: 1 for PTX, 2 for machine code. All inputs of the compilation
// are part of the key.
int make_key(void** key, int kind, const void* source, std::uint32_t size, const char* options, const char* host,
             const char* version, int first, int second);
int end_key(void* key);
// 0: `data` is `size` bytes; free it with end_data.
int find(void* key, int flags, void** data, std::uint32_t* size);
int keep(void* key, int flags, const void* data, std::uint32_t size);
int end_data(void* data);

}  // namespace rgpu::compile_cache
