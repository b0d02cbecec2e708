// The members of the run, each with a copy of the driver library, and how a call finds the one that it concerns.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "collectives.hpp"
#include "functions.hpp"
#include "routed.hpp"

namespace rgpu::router {

struct Member {
  unsigned number = 0;
  void* functions[kFunctions] = {};  // the copy's exports
  const MemberTable* table = nullptr;
  std::uintptr_t handles = 0;        // where its handles begin
  std::atomic<CUcontext> last{};     // the context that a thread made current last: for threads without one
  std::atomic<unsigned> waiting{0};  // points of its streams that wait for other members

  bool has(const void* handle) const {
    return reinterpret_cast<std::uintptr_t>(handle) - handles < table->handles_size;
  }
};

// Calls a function of the member's copy: CALL(member, cuInit)(0).
#define CALL(member, symbol) \
  (reinterpret_cast<decltype(&::symbol)>((member).functions[::rgpu::router::f_##symbol]))

unsigned members();               // of the run
Member* loaded(unsigned number);  // nullptr: nothing has used the member yet
// The member's copy, which is loaded and initialised at its first use. nullptr, with one line on stderr, where it
// cannot be.
Member* load(unsigned number);
Member& first();  // the copy for what all copies answer alike

// ---------------------------------------------------------------- whom a call concerns

// A member, and the context that is made current in its copy for the call where the thread's current context is another
// member's.
struct Where {
  Member* member;
  bool borrow;
};

Where current();                       // the thread's current context's member; the first one where it has none
Where of_device(CUdevice device);      // the first where there is no such device: it knows the error
Where of_address(std::uint64_t address);
Where of_host(const void* address);    // memory of the CPU, pinned or registered
Where in_context(Where where);         // the same member, with one of its contexts where the thread's is another's
Where of_handles(std::initializer_list<std::uintptr_t> handles);  // of the first that is one
Member* holder(const void* handle);    // nullptr: no member's
// Of an address in a device's range (not of a module's variable) or in the pinned range; nullptr: of none.
Member* owner(std::uint64_t address);
Member* pinned_owner(const void* address);
bool is_module_variable(std::uint64_t address);

template <class T>
std::uintptr_t number_of(T handle) {
  return (std::uintptr_t)handle;  // NOLINT: a pointer or an integer
}
#define HANDLE(name) ::rgpu::router::number_of(name)

// The member of a call while it is made.
class Borrowed {
 public:
  explicit Borrowed(Where where);
  explicit Borrowed(Member& member) : Borrowed(Where{&member, false}) {}
  Borrowed(Member& member, CUcontext context);
  ~Borrowed();
  Borrowed(const Borrowed&) = delete;
  Member& member() const { return *member_; }

 private:
  Member* member_;
  bool pushed_ = false;
};
#define AT(at, symbol) CALL((at).member(), symbol)

// ---------------------------------------------------------------- the thread's contexts

struct Entry {
  Member* member;
  CUcontext context;
};
std::vector<Entry>& stack();  // of the calling thread; the current one last

// ---------------------------------------------------------------- the rest

CUresult refused(unsigned function);  // not implemented
// A kernel of a library by the member's handle; any other handle stays.
CUfunction kernel_in(const Borrowed& at, CUfunction function);
void complain(const char* text);      // a line on stderr, once for each text

}  // namespace rgpu::router

extern "C" rgpu::RouterFacts rgpu_router_facts;
