// Copies to pinned memory that the program goes on behind: downloads.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "handles.hpp"

namespace rgpu {

bool downloads_open();  // cheap: are there any whose end the program was not told?
// Whether bytes of one that is known to be complete are still coming: a query answers "not ready" until then.
bool downloads_on_their_way();
// Whether a copy of so many bytes to there needs no waiting for.
bool may_download_later(std::uint64_t destination, std::uint64_t size);
// Gives the stream a copy to pinned memory. Waits only where too many are open. No lock held, as for all that follow.
CUresult download_later(const StreamRef& stream, const wire::MemcpyD2h& call, void* destination);

// These wait until the bytes are in the program's memory, and say so in the journal:
void finish_downloads();  // of those that are known to be complete. The program is about to learn of completions
void finish_downloads_into(std::uint64_t address, std::uint64_t size);
void finish_downloads_of(std::uint64_t stream);

// Whether the call is one of those that are open: its `completed` is published by finish_downloads().
bool is_download(std::uint64_t seq);
// Where the last call of all that a wait for the stream covers is such a copy in it: waits for that, and learns that all
// of them are complete. False: it is not.
bool await_download(std::uint64_t stream, const std::vector<StreamMark>& marks, CUresult& result);

}  // namespace rgpu
