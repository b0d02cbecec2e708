// Copies to pinned memory that the program does not wait for: downloads.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "handles.hpp"

namespace rgpu {

bool downloads_open();  // cheap: is there a copy whose end was not reported to the program?
// Whether bytes of a copy that is known to be complete are still to be received: a query answers "not ready" until
// then.
bool downloads_on_their_way();
// Whether a copy of `size` bytes to `destination` need not be awaited.
bool may_download_later(std::uint64_t destination, std::uint64_t size);
// Gives the stream a copy to pinned memory. Waits only where too many are open. No lock held, as for all functions
// below.
CUresult download_later(const StreamRef& stream, const wire::MemcpyD2h& call, void* destination);

// These wait until the bytes are in the program's memory, and record that in the journal:
void finish_downloads();  // copies known to be complete; call before completions are reported
void finish_downloads_into(std::uint64_t address, std::uint64_t size);
void finish_downloads_of(std::uint64_t stream);

// Whether the call is an open copy: its `completed` is published by finish_downloads().
bool is_download(std::uint64_t seq);
// If the last call that a wait for the stream covers is an open copy in that stream: waits for the copy, and notes all
// these calls as complete. False: it is no such copy.
bool await_download(std::uint64_t stream, const std::vector<StreamMark>& marks, CUresult& result);

}  // namespace rgpu
