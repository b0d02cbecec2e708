// Memory and events of other processes, as used by memory, context and event code (ipc.cpp, ipc_event.cpp).
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>

#include "memory.hpp"

namespace rgpu {

// The bytes that a program passes to another process: docs/developers/objects/shared-memory.md.
struct IpcToken {
  static constexpr std::size_t kSize = 64, kSecretSize = 16;
  enum Kind : std::uint64_t { memory = 1, event = 2 };
  std::array<std::uint8_t, kSize> bytes{};

  explicit IpcToken(const void* reserved) { std::memcpy(bytes.data(), reserved, kSize); }
  std::uint64_t word(std::size_t offset) const {
    std::uint64_t found;
    std::memcpy(&found, bytes.data() + offset, sizeof found);
    return found;
  }
  bool is(Kind kind) const { return !std::memcmp(bytes.data(), "RGPUIPC1", 8) && word(8) == kind; }
  std::uint64_t number() const { return word(40); }
  std::uint64_t size() const { return word(48); }
};

// Sixteen random bytes that cannot be guessed.
std::array<std::uint8_t, IpcToken::kSecretSize> ipc_secret();

// The token by which other processes open the allocation; made at the first call, which waits for the device.
CUresult token_of_memory(const Place& place, void* token);
// Maps the memory that the token names, once for each context. `pooled`: the program frees it as memory of its own.
// CUDA_ERROR_INVALID_CONTEXT: it is this process's, or another context's.
CUresult open_memory(Context& context, const IpcToken& token, bool pooled, std::uint64_t& address);
// Frees the memory of another process's pool at the address, when the device's work is complete; nullopt: there is
// none.
std::optional<CUresult> free_imported(std::uint64_t address);
// The same without waiting: decrements the open count. `last`: end_hidden_import(address) must follow, when the work
// that may use it is known to be complete. False: there is none of that kind.
bool hide_imported(std::uint64_t address, bool& last);
void end_hidden_import(std::uint64_t address);
// Makes a file with 64 bytes for another process, and reads such a file; nullopt: it is another kind of file.
int file_of_bytes(const void* bytes);
std::optional<std::array<char, IpcToken::kSize>> bytes_of_file(int fd);

// Whether other processes may have a handle of the allocation that is, or was, at the address.
bool exported_memory(std::uint64_t address);
// The memory of another process that is mapped at an address; Kind::host for none.
Place imported_place(std::uint64_t address);
// Closes everything that was opened in a context.
void release_imports(Context& context);

// ipc_event.cpp
// Call after the event was recorded: other processes that wait for it wait for that record from now on.
CUresult mark_exported(const Event& event);
// Functions for another process's event, in place of those for the program's own.
CUresult query_imported(const Event& event);
CUresult synchronize_imported(const Event& event);
CUresult wait_for_imported(const StreamRef& stream, const Event& event);
CUresult destroy_imported(const Event& event);

}  // namespace rgpu
