// Memory and events of other processes, as memory, context and event code sees them (ipc.cpp, ipc_event.cpp).
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>

#include "memory.hpp"

namespace rgpu {

// What a program carries to another process: docs/developers/objects/shared-memory.md.
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

// Sixteen bytes that nobody guesses.
std::array<std::uint8_t, IpcToken::kSecretSize> ipc_secret();

// The token by which others open the allocation; made at the first call. Waits for the device then.
CUresult token_of_memory(const Place& place, void* token);
// Maps what the token names, once for each context. `pooled`: the program frees it as memory of its own.
// CUDA_ERROR_INVALID_CONTEXT: it is this process's, or another context's.
CUresult open_memory(Context& context, const IpcToken& token, bool pooled, std::uint64_t& address);
// What of a pool of another process is at the address is freed, when the device's work is complete; nullopt: none is.
std::optional<CUresult> free_imported(std::uint64_t address);
// The same without waiting: once less open at once. `last`: end_hidden_import(address) is to follow, when the work that may
// use it is known to be complete. False: nothing of that kind is there.
bool hide_imported(std::uint64_t address, bool& last);
void end_hidden_import(std::uint64_t address);
// A file with 64 bytes for another process, and what such a file holds; nullopt: it is none.
int file_of_bytes(const void* bytes);
std::optional<std::array<char, IpcToken::kSize>> bytes_of_file(int fd);

// Whether others may have a handle of what is, or was, at the address.
bool exported_memory(std::uint64_t address);
// What of another process is mapped at an address; Kind::host for nothing.
Place imported_place(std::uint64_t address);
// Lets go of everything that was opened in a context.
void release_imports(Context& context);

// ipc_event.cpp
// The event was recorded: whoever waits for it in another process waits for that record from now on.
CUresult mark_exported(const Event& event);
// Another process's event: what the event functions do instead of what they do with the program's own.
CUresult query_imported(const Event& event);
CUresult synchronize_imported(const Event& event);
CUresult wait_for_imported(const StreamRef& stream, const Event& event);
CUresult destroy_imported(const Event& event);

}  // namespace rgpu
