// libcupti.so.12 and .13: the CUPTI functions that a profiler in the program calls. Both are built from the same files
// with different CUPTI_MAJOR.
#pragma once

#include <cstdint>

#include "profile_table.hpp"
#include "records.hpp"

#define CUPTI_API extern "C" __attribute__((visibility("default"))) int

namespace rgpu::cupti {

// The driver library's table; nullptr where the program runs on another driver library than ours.
const profile::Table* driver();
int failed(int result);  // kept for cuptiGetLastError

// Converts a time of the driver library's clock to the clock that the program reads: its own, where it registered one.
std::uint64_t program_time(std::uint64_t time);
// Names of the functions that have callbacks, by number, each ended by a zero (generated from callbacks.txt).
extern const char driver_names[], runtime_names[];
extern const unsigned driver_name_count, runtime_name_count;
void forget_callbacks();  // removes the program's callbacks: cuptiFinalize
void forget_activities();

}  // namespace rgpu::cupti
