// Modules, linking and functions of the fake driver. A module's image is text, one kernel a line ("add_one 12": name,
// bytes of parameters) or a variable as in PTX (".global .b8 NAME[SIZE];"). cuModuleLoadData takes our own module,
// whatever its image is. After fake_loads_wait(1) loading waits for all streams, as it may on a real driver.
#include "driver.hpp"

namespace {

std::atomic<unsigned> links{0}, attribute_calls{0}, compile_ms{0};
// What it links is the text behind a line that marks machine code; the order of the kernels is another then.
std::string linked;

}  // namespace

API void fake_compile_ms(unsigned ms) { compile_ms = ms; }

API Result cuModuleLoadDataEx(void **handle, const void *image, unsigned, void *, void *) {
    rest();
    auto module = std::make_unique<Module>();
    if (*static_cast<const char *>(image) == '.') std::this_thread::sleep_for(std::chrono::milliseconds(compile_ms));
    std::istringstream text(static_cast<const char *>(image));
    for (std::string line; std::getline(text, line);) {
        std::istringstream words(line);
        std::string name;
        words >> name;
        if (name == "bad") return 218;
        if (name[0] == '\x7f' || (name[0] == '.' && name != ".global")) continue;  // a cubin of cuLinkComplete, directives
        if (name == ".global") {
            words >> name >> name;
            const size_t bracket = name.find('['), size = std::stoul(name.substr(bracket + 1));
            void *memory = calloc(1, size);
            module->globals[name.substr(0, bracket)] = {memory, size};
            std::lock_guard guard(variables_lock);
            variables[reinterpret_cast<Ptr>(memory)] = {size, current};
        } else if (!name.empty()) {
            auto kernel = std::make_unique<Kernel>(Kernel{name, 0, 49152});
            words >> kernel->size;
            module->kernels.push_back(std::move(kernel));
        }
    }
    *handle = module.release();
    return 0;
}
API Result cuLinkCreate_v2(unsigned, void *, void *, void **state) { return linked.clear(), *state = &linked, ++links, 0; }
API Result cuLinkAddData_v2(void *, int, const void *data, size_t size, const char *, unsigned, void *, void *) {
    std::istringstream text(std::string(static_cast<const char *>(data), size - 1));
    std::string before;
    for (std::string line; std::getline(text, line);) {
        if (line == "unlinkable") return 218;
        before = line[0] == '.' ? before + line + "\n" : line + "\n" + before;
    }
    linked = "\x7f" "ELF\n" + before;
    return 0;
}
API Result cuLinkComplete(void *, const void **data, size_t *size) { return *data = linked.data(), *size = linked.size(), 0; }
API Result cuLinkDestroy(void *) { return 0; }
API unsigned fake_links() { return links; }
API unsigned fake_attribute_calls() { return attribute_calls; }
API Result cuModuleLoadData(void **handle, const void *) {
    auto module = std::make_unique<Module>();
    for (const char *name : {"rgpu_hash_pages", "rgpu_copy_hash_pages", "rgpu_combine"})
        module->kernels.push_back(std::make_unique<Kernel>(Kernel{name, 64, 49152}));
    return *handle = module.release(), 0;
}
API Result cuModuleGetFunction(void **function, void *module, const char *name) {
    for (auto &kernel : static_cast<Module *>(module)->kernels)
        if (kernel->name == name) return *function = kernel.get(), 0;
    return 500;
}
API Result cuFuncLoad(void *) { return 0; }
API Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *, int, size_t) { return *blocks = 3, 0; }
API Result cuModuleUnload(void *) { return 0; }
API Result cuModuleGetFunctionCount(unsigned *count, void *module) {
    return *count = static_cast<unsigned>(static_cast<Module *>(module)->kernels.size()), 0;
}
API Result cuModuleEnumerateFunctions(void **functions, unsigned count, void *module) {
    for (unsigned i = 0; i < count; ++i) functions[i] = static_cast<Module *>(module)->kernels[i].get();
    return 0;
}
API Result cuFuncGetName(const char **name, void *function) { return *name = static_cast<Kernel *>(function)->name.c_str(), 0; }
API Result cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    if (index || !static_cast<Kernel *>(function)->size) return 1;
    return *offset = 0, *size = static_cast<Kernel *>(function)->size, 0;
}
API Result cuFuncGetAttribute(int *value, int attribute, void *function) {
    ++attribute_calls;
    return *value = attribute == 8 ? static_cast<Kernel *>(function)->max_dynamic : 0, 0;
}
API Result cuFuncSetAttribute(void *function, int attribute, int value) {
    if (attribute == 8) static_cast<Kernel *>(function)->max_dynamic = value;
    return 0;
}
API Result cuModuleGetGlobal_v2(Ptr *address, size_t *size, void *module, const char *name) {
    auto &globals = static_cast<Module *>(module)->globals;
    auto found = globals.find(name);
    if (found == globals.end()) return 500;
    return *address = reinterpret_cast<Ptr>(found->second.first), *size = found->second.second, 0;
}
