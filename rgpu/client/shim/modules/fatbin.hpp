// The binary that a program passes to a load: its end, and its entries.
//
// A load gets a pointer without a size. It points to a fat binary's wrapper (magic 0x466243B1), a fat binary
// (0xBA55ED50), an ELF cubin, or PTX text. The headers contain the sizes; every sum is checked before a byte behind it
// is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace rgpu::module_binary {

enum class Kind { fatbin, elf, ptx };

struct Binary {
    const void* data = nullptr;
    std::size_t size = 0;  // bytes, for PTX without its terminating NUL
    Kind kind = Kind::fatbin;
};

enum class Verdict {
    ok,
    null,     // CUDA_ERROR_INVALID_VALUE
    invalid,  // CUDA_ERROR_INVALID_IMAGE
};

// The largest binary that a journal record may carry.
inline constexpr std::uint64_t kLargest = std::uint64_t{16} << 30;

// Finds the binary that `data` points to. Reads only the bytes that the headers found so far cover.
Verdict find(const void* data, Binary* out);

// One code entry of a fat binary.
struct Entry {
    enum class Code : std::uint16_t { ptx = 1, elf = 2 };
    std::uint16_t kind;
    std::uint32_t architecture;  // 75 for sm_75
    std::uint64_t size;          // as stored, perhaps compressed
    std::uint64_t flags;         // 0 where the header is too short to contain them
    std::uint64_t offset;        // of its header, from the binary's start
    std::uint64_t length;        // with its header
};

// The entries of a fat binary; empty where it cannot be read.
std::vector<Entry> entries(const Binary& binary);

// False only where the binary certainly contains nothing for compute capability `major`.`minor`: a cubin needs the same
// major and no higher minor, PTX no higher architecture. The worker may still refuse the binary (it may not run
// cubins).
bool may_run_on(const Binary& binary, int major, int minor);

// Reads the whole file, with a NUL behind it so that PTX text ends. False when it cannot be read.
bool read_file(const char* path, std::string* out);

}  // namespace rgpu::module_binary
