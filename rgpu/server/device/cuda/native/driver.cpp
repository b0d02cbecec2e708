#include "driver.hpp"

#include <dlfcn.h>

namespace rgpu {

std::string Driver::open() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) return std::string("no driver: ") + dlerror();
#define RGPU_FIND(member, name, parameters)                                   \
    member = reinterpret_cast<decltype(member)>(dlsym(library, name));        \
    if (!member) return std::string("the driver lacks ") + name;
    RGPU_DRIVER_FUNCTIONS(RGPU_FIND)
#undef RGPU_FIND
    return {};
}

}  // namespace rgpu
