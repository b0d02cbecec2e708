// libcupti.so.12 and .13: what a profiler in the program calls. Both are made of the same files; CUPTI_MAJOR differs.
#pragma once

#include <cstdint>

#include "profile_table.hpp"
#include "records.hpp"

#define CUPTI_API extern "C" __attribute__((visibility("default"))) int

namespace rgpu::cupti {

// The driver library's table; nullptr where the program runs on another driver than ours.
const profile::Table* driver();
int failed(int result);  // kept for cuptiGetLastError

// A time of the driver library's clock on the one that the program reads: its own, where it registered one.
std::uint64_t program_time(std::uint64_t time);
// The functions that callbacks are of, by number, each ended by a zero (generated from callbacks.txt).
extern const char driver_names[], runtime_names[];
extern const unsigned driver_name_count, runtime_name_count;
void forget_callbacks();  // the program's: cuptiFinalize
void forget_activities();

}  // namespace rgpu::cupti
