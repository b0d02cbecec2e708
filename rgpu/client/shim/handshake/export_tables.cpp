// cuGetExportTable: the driver's private tables that the CUDA runtime and its libraries request.
//
// Sizes and slots as measured with libcudart 12.4 to 13.0, cuBLAS(Lt) and cuFFT; word 0 of a table is its size in bytes
// unless stated otherwise. Every slot without a name below returns CUDA_ERROR_NOT_SUPPORTED and is logged once, so that
// the next missing function is named; so is a table that is not implemented. Slots whose callers are known to accept
// the refusal (kRefused) are not logged.
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "api.hpp"
#include "collectives.hpp"
#include "compile_cache.hpp"
#include "context.hpp"
#include "device.hpp"
#include "handshake_md2.hpp"
#include "module.hpp"
#include "profile.hpp"
#include "routed.hpp"
#include "runtime_functions.hpp"

namespace rgpu {
namespace {

using Words = const void* const*;

constexpr const char* kTableNames[] = {"CUDART_INTERFACE", "RUNTIME_CALLBACK_HOOKS", "TOOLS_TLS",
                                       "CONTEXT_LOCAL_STORAGE", "CTX_CHECKS", "SELF_TEST", "cuBLAS", "cuBLASLt",
                                       "module functions", "NVRTC"};

// Slots whose caller continues without them, at full speed (docs/developers/shim.md): cuBLASLt's 4 (which group each
// multiprocessor belongs to), called by its GEMM on Hopper.
constexpr std::pair<unsigned, std::size_t> kRefused[] = {{kCublasLt, 4}};

// Logs, with RGPU_SHIM_LOG=1, the arguments of a slot whose signature is not fully known: six words, perhaps more than
// it uses.
template <typename... Arguments>
void log_arguments(const char* table, unsigned slot, Arguments... arguments) {
    static_assert(sizeof...(arguments) == 6);
    log_line("export table %s: slot %u called with %p %p %p %p %p %p", table, slot,
             static_cast<const void*>(arguments)...);
}

// Not a template: there are about a thousand slots, and each would be compiled with strings of its own.
[[gnu::noinline]] CUresult not_implemented(unsigned table, std::size_t slot, void* a, void* b, void* c, void* d,
                                           void* e, void* f) {
    log_arguments(kTableNames[table], static_cast<unsigned>(slot), a, b, c, d, e, f);
    for (const auto& refused : kRefused)
        if (refused == std::pair(table, slot)) return CUDA_ERROR_NOT_SUPPORTED;
    log_once("slot " + std::to_string(table) + "." + std::to_string(slot),
             "export table %s: slot %zu was called and is not implemented", kTableNames[table], slot);
    return CUDA_ERROR_NOT_SUPPORTED;
}

template <unsigned T, std::size_t Slot>
CUresult unnamed_slot(void* a, void* b, void* c, void* d, void* e, void* f) {
    return not_implemented(T, Slot, a, b, c, d, e, f);
}

template <typename F>
const void* address_of(F* function) {
    return reinterpret_cast<const void*>(function);
}

template <unsigned T, std::size_t... Slot>
std::array<const void*, sizeof...(Slot)> stubs(std::index_sequence<Slot...>) {
    return {address_of(&unnamed_slot<T, Slot>)...};
}

// A table of N words; `named` are the implemented slots.
template <unsigned T, std::size_t N>
std::array<const void*, N> make(std::initializer_list<std::pair<std::size_t, const void*>> named, bool sized = true) {
    auto words = stubs<T>(std::make_index_sequence<N>());
    if (sized) words[0] = reinterpret_cast<const void*>(N * sizeof(void*));
    for (const auto& [slot, function] : named) words[slot] = function;
    if (const RouterFacts* router = router_facts())
        for (const auto& [slot, function] : named) words[slot] = router->slot(member_number(), T, slot, function);
    return words;
}

// ---------------------------------------------------------------- CUDART_INTERFACE

CUresult module_from_fatbin(CUmodule* module, const void* wrapper) { return cuModuleLoadData(module, wrapper); }

CUresult module_from_fatbin_extended(CUmodule* module, const void* wrapper, void*, void*, unsigned) {
    return cuModuleLoadData(module, wrapper);
}

CUresult module_from_fatbin_extended2(const void* fatbin, CUmodule* module, void*, void*, unsigned) {
    return cuModuleLoadData(module, fatbin);
}

// Returns the handle only: the runtime retains the context itself, later.
CUresult primary_handle(CUcontext* out, CUdevice device) {
    if (CUresult r = require_session(); r) return r;
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (session_device(device) < 0) return CUDA_ERROR_INVALID_DEVICE;
    const Context* context = primary_context(device);
    if (context == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = static_cast<CUcontext>(context->handle);
    return CUDA_SUCCESS;
}

CUresult load_compilers() { return CUDA_SUCCESS; }  // the worker has the compilers

// ---------------------------------------------------------------- small tables

// The flags by which a tool subscribes to a runtime's functions: one word for each.
CUresult runtime_flags(std::uint32_t** flags, std::size_t* count) {
    if (flags == nullptr || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flags = profile::runtime_flags();
    *count = profile::kRuntimeFunctions;
    return CUDA_SUCCESS;
}

// The same for whole domains, which no tool uses here.
CUresult domain_flags(std::uint32_t** flags, std::size_t* count) {
    static std::array<std::uint32_t, 14> words{};
    if (flags == nullptr || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flags = words.data();
    *count = words.size();
    return CUDA_SUCCESS;
}

CUresult thread_context(CUcontext* out) {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Context* context = top_context();
    *out = context != nullptr ? static_cast<CUcontext>(context->handle) : nullptr;
    return CUDA_SUCCESS;
}

CUresult check_context(CUcontext, std::uint32_t* out, void**) {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *out = 0;
    return CUDA_SUCCESS;
}

std::uint32_t check_nothing() { return 0; }

CUresult context_id(CUcontext context, std::uint64_t* id) {
    unsigned long long value = 0;
    const CUresult result = cuCtxGetId(context, &value);
    if (result == CUDA_SUCCESS && id != nullptr) *id = value;
    return result;
}

// Slots that cuBLAS calls for a stream before double-precision reductions (ddot, and cuSOLVER's dgesvd through it):
// slot 51 `(context, stream, void **object)` returns an object of the driver's, CUDA_ERROR_INVALID_HANDLE for the
// handle -1; slot 39 `(context, stream, uint64_t *value)`, called beside it, returns 0. A public reimplementation
// returns the same, with zeros behind the object (SCUDA, its client for CUDA 13). Here each stream has an object of its
// own: a library that stores state by the object stores it by stream.
CUresult stream_object(CUcontext context, CUstream stream, void** object, void* fourth, void* fifth, void* sixth) {
    log_arguments("cuBLAS", 51, context, stream, object, fourth, fifth, sixth);
    if (object == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (reinterpret_cast<std::uintptr_t>(stream) == UINTPTR_MAX) return CUDA_ERROR_INVALID_HANDLE;
    struct Zeros {
        alignas(64) std::array<std::uint8_t, 4096> bytes{};
    };
    static std::mutex lock;
    static auto* objects = new std::map<CUstream, std::unique_ptr<Zeros>>;  // libraries outlive static objects
    std::lock_guard guard(lock);
    auto& zeros = (*objects)[stream];
    if (!zeros) zeros = std::make_unique<Zeros>();
    *object = zeros->bytes.data();
    return CUDA_SUCCESS;
}

CUresult stream_value(CUcontext context, CUstream stream, std::uint64_t* value, void* fourth, void* fifth, void* sixth) {
    log_arguments("cuBLAS", 39, context, stream, value, fourth, fifth, sixth);
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *value = 0;
    return CUDA_SUCCESS;
}

using EachFunction = void (*)(void* user, CUfunction function, std::uint64_t index);

// Calls `each` for every function of the module, and returns the number of functions.
std::uint64_t each_function(CUcontext, CUmodule handle, EachFunction each, void* user) {
    const Module* module = find(handle);
    if (module == nullptr || each == nullptr) return 0;
    for (std::size_t i = 0; i < module->functions.size(); ++i) {
        each(user, static_cast<CUfunction>(module->functions[i]->handle), i);
    }
    return module->functions.size();
}

// ---------------------------------------------------------------- SELF_TEST and the tables

CUresult self_test(std::uint32_t version, std::uint64_t unix_seconds, std::uint64_t* out);

Words cudart_table() {
    static const auto words = make<kCudart, 13>({{1, address_of(&module_from_fatbin)},
                                                 {2, address_of(&primary_handle)},
                                                 {6, address_of(&module_from_fatbin_extended)},
                                                 {8, address_of(&module_from_fatbin_extended2)},
                                                 {12, address_of(&load_compilers)}});
    return words.data();
}

Words hooks_table() {
    static const auto words = make<kHooks, 7>({{1, address_of(&profile::runtime_function)},
                                               {2, address_of(&runtime_flags)},
                                               {3, address_of(&profile::runtime_stream_id)},
                                               {4, address_of(&profile::runtime_context_id)},
                                               {6, address_of(&domain_flags)}});
    return words.data();
}

Words tools_table() {
    static const auto words = make<kToolsTls, 4>({{2, address_of(&thread_context)}});
    return words.data();
}

Words storage_table() {
    static const auto words = make<kStorage, 4>({{0, address_of(&storage_put)},
                                                 {1, address_of(&storage_delete)},
                                                 {2, address_of(&storage_get)},
                                                 {3, nullptr}},
                                                false);
    return words.data();
}

Words checks_table() {
    static const auto words =
        make<kContextChecks, 4>({{2, address_of(&check_context)}, {3, address_of(&check_nothing)}});
    return words.data();
}

Words self_test_table() {
    static const auto words = make<kSelfTest, 3>({{1, address_of(&self_test)}});
    return words.data();
}

Words cublas_table() {
    static const auto words = make<kCublas, 93>(
        {{4, address_of(&context_id)}, {39, address_of(&stream_value)}, {51, address_of(&stream_object)}});
    return words.data();
}

// cuBLASLt uses this table without checking its size.
Words cublaslt_table() {
    static const auto words = make<kCublasLt, 17>({});
    return words.data();
}

Words functions_table() {
    static const auto words = make<kModuleFunctions, 99>({{7, address_of(&each_function)}});
    return words.data();
}

Words nvrtc_table() {
    static const auto words = make<kNvrtc, 7>({{1, address_of(&compile_cache::make_key)},
                                               {2, address_of(&compile_cache::end_key)},
                                               {3, address_of(&compile_cache::find)},
                                               {4, address_of(&compile_cache::keep)},
                                               {6, address_of(&compile_cache::end_data)}});
    return words.data();
}

// The table for our libcupti.so: profile_table.hpp.
Words profile_table() { return reinterpret_cast<Words>(profile::table()); }

CUresult self_test(std::uint32_t version, std::uint64_t unix_seconds, std::uint64_t* out) {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    handshake::SelfTest test{};
    test.driver_version = static_cast<std::uint32_t>(driver_version());
    test.version = version;
    test.pid = static_cast<std::uint32_t>(::getpid());
    test.thread = static_cast<std::uint32_t>(::pthread_self());
    test.cudart_table = reinterpret_cast<std::uintptr_t>(cudart_table());
    test.self_test_table = reinterpret_cast<std::uintptr_t>(self_test_table());
    test.function = reinterpret_cast<std::uintptr_t>(&self_test);
    test.unix_seconds = unix_seconds;
    for (CUdevice i = 0, n = device_count(); i < n; ++i) {
        const DeviceFacts& device = *device_facts(i);
        auto& tested = test.devices.emplace_back();
        std::memcpy(tested.uuid.data(), device.uuid, tested.uuid.size());
        tested.pci_domain = device.pci_domain;
        tested.pci_bus = device.pci_bus;
        tested.pci_device = device.pci_device;
    }
    const auto words = handshake::self_test_answer(test);
    out[0] = words[0];
    out[1] = words[1];
    return CUDA_SUCCESS;
}

Words collectives_words() { return reinterpret_cast<Words>(&collectives_table()); }

Words member_words() { return reinterpret_cast<Words>(&member_table()); }

struct Known {
    const char* uuid;  // bytes in memory order, hexadecimal
    Words (*table)();  // nullptr: known, optional, and not implemented
};

constexpr Known kKnown[] = {
    {"6bd5fb6c5bf4e74a8987d93912fd9df9", cudart_table},
    {"a094798c2e742e7493f20800200c0a66", hooks_table},
    {"42d85a8123f6cb478298f6e78a3aecdc", tools_table},
    {"c693336e1121df11a8c368f355d89593", storage_table},
    {"263e88607cd2614392f6bbd5006dfa7e", checks_table},
    {"d4082055bde6704b8d34ba123c66e1f2", self_test_table},
    {"21318c60971432488ca641ff7324c8f2", cublas_table},
    {"1734dc26800d47458726c0f1e7dd8bca", cublaslt_table},
    {"6e163fbeb958444d835ce182aff1991e", functions_table},
    {"726770759b1d4e52a30c6f1e55d72001", profile_table},
    {kCollectivesTable, collectives_words},  // ours: requested by our libnccl.so.2
    {kMemberTable, member_words},  // ours: requested by the routing library
    {"f8cff95121468b4eb9e2fb469e7c0dd9", nullptr},  // requested by libcudart 12.9 and later
    {"69a28e9f24498b47b030c5da330ea4e9", nullptr},  // requested by the real libnvidia-ml
    {"da9151d33ae6cc41a5c04f26d533e328", nvrtc_table},
};

std::array<char, 33> hexadecimal(const CUuuid& uuid) {
    std::array<char, 33> text{};
    for (std::size_t i = 0; i < 16; ++i) {
        std::snprintf(text.data() + 2 * i, 3, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    }
    return text;
}

// The file name of the library that contains an address.
const char* library_at(const void* address) {
    Dl_info info{};
    return ::dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "an unknown library";
}

}  // namespace
}  // namespace rgpu

extern "C" {

CUresult cuGetExportTable(const void** ppExportTable, const CUuuid* pExportTableId) {
    const void* caller = __builtin_return_address(0);
    if (ppExportTable == nullptr || pExportTableId == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto wanted = rgpu::hexadecimal(*pExportTableId);
    for (const rgpu::Known& known : rgpu::kKnown) {
        if (std::strcmp(known.uuid, wanted.data()) != 0) continue;
        if (known.table == nullptr) return CUDA_ERROR_NOT_FOUND;
        *ppExportTable = known.table();
        return CUDA_SUCCESS;
    }
    rgpu::log_once(std::string("table ") + wanted.data(), "export table %s is not known; %s asked for it",
                   wanted.data(), rgpu::library_at(caller));
    return CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
