#include "slots.hpp"

#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "members.hpp"

namespace rgpu::router {
namespace {

// The copies' own functions, by member, table and slot.
std::map<std::array<std::size_t, 3>, const void*>& originals() {
  static auto* found = new std::map<std::array<std::size_t, 3>, const void*>;
  return *found;
}
std::mutex& originals_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

// Ids of the tables with replaced slots: export_tables.cpp.
constexpr std::pair<Table, const char*> kIds[] = {{kCudart, "6bd5fb6c5bf4e74a8987d93912fd9df9"},
                                                  {kStorage, "c693336e1121df11a8c368f355d89593"},
                                                  {kCublas, "21318c60971432488ca641ff7324c8f2"},
                                                  {kModuleFunctions, "6e163fbeb958444d835ce182aff1991e"}};

CUuuid id_of(const char* text) {
  CUuuid id{};
  for (int i = 0; i < 16; ++i) {
    unsigned value = 0;
    std::sscanf(text + 2 * i, "%2x", &value);
    id.bytes[i] = static_cast<char>(value);
  }
  return id;
}

const void* original(const Member& member, Table table, std::size_t slot) {
  for (int asked = 0; asked < 2; ++asked) {
    {
      std::lock_guard guard(originals_lock());
      const auto found = originals().find({member.number, table, slot});
      if (found != originals().end()) return found->second;
    }
    for (const auto& [which, id] : kIds)
      if (which == table) table_of(member, id);  // makes the copy fill its table
  }
  return nullptr;
}

// Calls the member's own function of a slot.
template <class... Arguments>
CUresult own_slot(Where where, Table table, std::size_t slot, Arguments... arguments) {
  const Borrowed at(where);
  void* own = const_cast<void*>(original(at.member(), table, slot));
  const auto function = reinterpret_cast<CUresult (*)(Arguments...)>(own);
  return function ? function(arguments...) : CUDA_ERROR_NOT_SUPPORTED;
}

// ---------------------------------------------------------------- replaced slots

template <std::size_t Slot>
CUresult module_from_fatbin(void* a, void* b, void* c, void* d, void* e) {
  return own_slot(current(), kCudart, Slot, a, b, c, d, e);
}

CUresult primary_handle(CUcontext* out, CUdevice device) {
  return own_slot(of_device(device), kCudart, 2, out, device);
}

CUresult thread_context(CUcontext* out) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = stack().empty() ? nullptr : stack().back().context;
  return CUDA_SUCCESS;
}

CUresult storage_put(CUcontext context, void* key, void* value, void* destructor) {
  return own_slot(of_handles({HANDLE(context)}), kStorage, 0, context, key, value, destructor);
}
CUresult storage_delete(CUcontext context, void* key) {
  return own_slot(of_handles({HANDLE(context)}), kStorage, 1, context, key);
}
CUresult storage_get(void** value, CUcontext context, void* key) {
  return own_slot(of_handles({HANDLE(context)}), kStorage, 2, value, context, key);
}

template <std::size_t Slot>
CUresult of_context(CUcontext context, void* b, void* c, void* d, void* e, void* f) {
  return own_slot(of_handles({HANDLE(b), HANDLE(context)}), kCublas, Slot, context, b, c, d, e, f);
}
CUresult context_id(CUcontext context, void* id) {
  return own_slot(of_handles({HANDLE(context)}), kCublas, 4, context, id);
}

std::uint64_t each_function(CUcontext context, CUmodule module, void* each, void* user) {
  const Borrowed at(of_handles({HANDLE(module)}));
  const void* own = original(at.member(), kModuleFunctions, 7);
  return own ? reinterpret_cast<decltype(&each_function)>(const_cast<void*>(own))(context, module, each, user) : 0;
}

template <class F>
const void* address(F* function) {
  return reinterpret_cast<const void*>(function);
}

const std::map<std::pair<unsigned, std::size_t>, const void*>& replaced() {
  static const auto* table = new std::map<std::pair<unsigned, std::size_t>, const void*>{
      {{kCudart, 1}, address(&module_from_fatbin<1>)}, {{kCudart, 2}, address(&primary_handle)},
      {{kCudart, 6}, address(&module_from_fatbin<6>)}, {{kCudart, 8}, address(&module_from_fatbin<8>)},
      {{kToolsTls, 2}, address(&thread_context)},      {{kStorage, 0}, address(&storage_put)},
      {{kStorage, 1}, address(&storage_delete)},       {{kStorage, 2}, address(&storage_get)},
      {{kCublas, 4}, address(&context_id)},            {{kCublas, 39}, address(&of_context<39>)},
      {{kCublas, 51}, address(&of_context<51>)},       {{kModuleFunctions, 7}, address(&each_function)}};
  return *table;
}

// ---------------------------------------------------------------- communicators

// Numbers of communicators are each session's own: the program's have the member's in the upper byte.
constexpr unsigned kShift = 56;

CUresult create(std::uint32_t ranks, std::uint32_t rank, const void* unique, std::uint32_t unique_size,
                const void* others, std::uint32_t others_size, std::uint64_t* number) {
  const Borrowed at(current());
  const CUresult r = collectives(at.member()).create(ranks, rank, unique, unique_size, others, others_size, number);
  if (!r) *number |= static_cast<std::uint64_t>(at.member().number) << kShift;
  return r;
}

CUresult destroy(std::uint64_t number, bool abort) {
  Member* member = loaded(static_cast<unsigned>(number >> kShift));
  return member ? collectives(*member).destroy(number << 8 >> 8, abort) : CUDA_ERROR_INVALID_VALUE;
}

CUresult group(const CollectiveOperation* operations, const CUcontext* contexts, std::size_t count,
               const CollectiveRange* ranges, std::size_t range_count) {
  for (unsigned number = 0; number < members(); ++number) {
    std::vector<CollectiveOperation> part;
    std::vector<CUcontext> where;
    std::vector<CollectiveRange> touched;
    for (std::size_t i = 0; i < count; ++i) {
      if (operations[i].communicator >> kShift != number) continue;
      part.push_back(operations[i]);
      part.back().communicator = operations[i].communicator << 8 >> 8;
      where.push_back(contexts[i]);
    }
    if (part.empty()) continue;
    Member* member = loaded(number);
    if (!member) return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t i = 0; i < range_count; ++i)
      if (Member* whose = owner(ranges[i].address); !whose || whose == member) touched.push_back(ranges[i]);
    const Borrowed at(Where{member, true});
    const CollectivesTable& own = collectives(*member);
    if (CUresult r = own.group(part.data(), where.data(), part.size(), touched.data(), touched.size()); r) return r;
  }
  return CUDA_SUCCESS;
}

void unsupported(const char* name) { collectives(first()).unsupported(name); }
void complain_once(const char* key, const char* text) { collectives(first()).complain(key, text); }

const char* session() { return current().member->table->session(); }

CUresult error() {
  for (unsigned i = 0; i < members(); ++i)
    if (Member* member = loaded(i); member && member->last.load())
      if (CUresult r = collectives(*member).error(); r) return r;
  return CUDA_SUCCESS;
}

}  // namespace

const void* replace_slot(unsigned member, unsigned table, std::size_t slot, const void* own) {
  {
    std::lock_guard guard(originals_lock());
    originals()[{member, table, slot}] = own;
  }
  const auto found = replaced().find({table, slot});
  return found == replaced().end() ? own : found->second;
}

const void* table_of(const Member& member, const char* id) {
  const CUuuid wanted = id_of(id);
  const void* table = nullptr;
  return CALL(member, cuGetExportTable)(&table, &wanted) ? nullptr : table;
}

const CollectivesTable& collectives(const Member& member) {
  return *static_cast<const CollectivesTable*>(table_of(member, kCollectivesTable));
}

CUresult export_table(const void** table, const CUuuid* id) {
  static const CollectivesTable routed{sizeof(CollectivesTable), create, destroy, group, unsupported, complain_once,
                                       error, session};
  static const CUuuid ours = id_of(kCollectivesTable);
  if (table && id && !std::memcmp(id, &ours, sizeof ours)) {
    *table = &routed;
    return CUDA_SUCCESS;
  }
  return CALL(first(), cuGetExportTable)(table, id);
}

}  // namespace rgpu::router
