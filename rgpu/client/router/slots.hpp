// Private tables of the driver library, and the slots whose answer depends on the member.
#pragma once

#include <cstddef>

#include "collectives.hpp"

namespace rgpu::router {

struct Member;

// Called by a copy for each slot that it implements; returns what the slot is to contain.
const void* replace_slot(unsigned member, unsigned table, std::size_t slot, const void* own);
// The member's table with that id (hexadecimal), nullptr where its copy has none.
const void* table_of(const Member& member, const char* id);
// The member's functions for communicators.
const CollectivesTable& collectives(const Member& member);
// The work of cuGetExportTable.
CUresult export_table(const void** table, const CUuuid* id);

}  // namespace rgpu::router
