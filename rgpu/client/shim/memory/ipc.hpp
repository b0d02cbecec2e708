// Memory and events of other processes, as memory, context and event code sees them (ipc.cpp, ipc_events.cpp).
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "memory.hpp"

namespace rgpu {

// What a program carries to another process: docs/developers/objects/shared-memory.md.
struct IpcToken {
  static constexpr std::size_t kSize = 64, kSecretSize = 16;
  enum Kind : std::uint64_t { memory = 1, event = 2 };
  std::array<std::uint8_t, kSize> bytes{};

  explicit IpcToken(const char (&reserved)[kSize]) { std::memcpy(bytes.data(), reserved, kSize); }
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

// Whether others may have a handle of what is, or was, at the address.
bool exported_memory(std::uint64_t address);
// What of another process is mapped at an address; Kind::host for nothing.
Place imported_place(std::uint64_t address);
// Lets go of everything that was opened in a context.
void release_imports(Context& context);

// streams/ipc_event.cpp
// The event was recorded: whoever waits for it in another process waits for that record from now on.
CUresult mark_exported(const Event& event);
// Another process's event: what the event functions do instead of what they do with the program's own.
CUresult query_imported(const Event& event);
CUresult synchronize_imported(const Event& event);
CUresult wait_for_imported(const StreamRef& stream, const Event& event);
CUresult destroy_imported(const Event& event);

}  // namespace rgpu
