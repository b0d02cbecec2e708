// cuModule*: loads are awaited, every query is answered from the load's table.
#include "graph.hpp"
#include "module.hpp"
#include "profile.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "api.hpp"
#include "context.hpp"
#include "device.hpp"
#include "managed.hpp"
#include "module_table.hpp"
#include "slim.hpp"

namespace rgpu {
namespace {

const DeviceFacts& facts_of(const Context& context) {
    return *device_facts(context.device);
}

// Whether the variable is set and a number other than 0: the driver's rule for a switch.
bool switched_on(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr && std::atoi(value) != 0;
}

// The entries of a fat binary that this device can use; empty: the binary is sent unchanged.
std::string useful_part(const module_binary::Binary& binary, const JitOptions& options, const DeviceFacts& device) {
    module_binary::Target target;
    target.major = device.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0);
    target.minor = device.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0);
    if (target.major <= 0 || options.chooses_entry()) return {};
    target.only_ptx = device.attribute(kOnlyPtxAttribute, 0) != 0;
    target.force_ptx = switched_on("CUDA_FORCE_PTX_JIT") || switched_on("CUDA_FORCE_JIT");
    return module_binary::slim(binary, target);
}

std::unique_ptr<Function> make_function(Module& module, std::uint32_t index, table::FunctionRow& row) {
    auto function = std::make_unique<Function>();
    function->module = &module;
    function->index = index;
    function->name = std::move(row.name);
    for (const auto& [offset, size] : row.parameters) {
        function->parameters.push_back({offset, size});
        function->parameter_bytes = std::max(function->parameter_bytes, offset + size);
    }
    for (std::size_t i = 0; i < row.attributes.size(); ++i) {
        function->attributes[i].store(row.attributes[i], std::memory_order_relaxed);
        if (row.attributes[i] < 0 && i != CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT)
            function->complete.store(false, std::memory_order_relaxed);
    }
    return function;
}

// Turns the answer's table into objects; all or nothing.
CUresult build(std::unique_ptr<Module> owned, table::Table table, Module*& out) {
    Module* module = owned.get();
    for (std::uint32_t i = 0; i < table.functions.size(); ++i) {
        auto function = make_function(*module, i, table.functions[i]);
        Function* made = function.get();
        if (enroll(std::move(function)) == nullptr) {
            for (Function* earlier : module->functions) retire(earlier);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        module->functions.push_back(made);
        module->function_index.emplace(made->name, i);
    }
    std::vector<Global> managed;
    for (std::uint32_t i = 0; i < table.globals.size(); ++i) {
        table::GlobalRow& row = table.globals[i];
        module->globals.push_back({std::move(row.name), row.address, row.size, row.managed});
        if (row.managed) managed.push_back(module->globals.back());
        module->global_index.emplace(module->globals.back().name, i);
    }
    if (CUresult r = track_managed_variables(*module, managed); r) {
        for (Function* earlier : module->functions) retire(earlier);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (enroll(std::move(owned)) == nullptr) {
        untrack_managed_variables(*module);
        for (Function* earlier : module->functions) retire(earlier);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    track_globals(*module);
    out = module;
    return CUDA_SUCCESS;
}

// Removes the module's handles; true for the one caller that does it.
bool end_handles(Module& module) {
    if (!retire(&module)) return false;
    untrack_globals(module);
    untrack_managed_variables(module);
    for (Function* function : module.functions) retire(function);
    return true;
}

wire::Blob blob(const std::vector<std::uint8_t>& bytes) {
    return {bytes.data(), static_cast<std::uint32_t>(bytes.size())};
}

}  // namespace

CUresult binary_of(const void* data, module_binary::Binary& binary) {
    switch (module_binary::find(data, &binary)) {
        case module_binary::Verdict::ok: return CUDA_SUCCESS;
        case module_binary::Verdict::null: return CUDA_ERROR_INVALID_VALUE;
        default: return CUDA_ERROR_INVALID_IMAGE;
    }
}

CUresult load_module(Context& context, const module_binary::Binary& binary, const JitOptions& options, bool library,
                     Module*& out) {
    const DeviceFacts& device = facts_of(context);
    const int major = device.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0);
    const int minor = device.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0);
    if (major > 0 && !module_binary::may_run_on(binary, major, minor)) return CUDA_ERROR_NO_BINARY_FOR_GPU;

    auto module = std::make_unique<Module>();
    module->context = &context;
    module->library = library;
    {
        const Section section;  // numbers are taken in the journal's order
        if (section.status() != CUDA_SUCCESS) return section.status();
        module->number = next_number();
    }
    wire::ModuleLoad call;
    call.module = module->number;
    call.context = context.number;
    call.library = library ? 1 : 0;
    call.options = blob(options.encoded());
    Answer answer;
    const std::string part = useful_part(binary, options, device);
    const CUresult result = part.empty() ? await(call, binary.data, binary.size, answer)
                                         : await(call, part.data(), part.size(), answer);
    wire::ModuleLoadReply reply;
    const bool readable = reply.read(answer.reply.data(), answer.reply.size());
    if (readable) {
        const std::string_view log(reinterpret_cast<const char*>(reply.log.data), reply.log.size);
        options.deliver(log, result != CUDA_SUCCESS);
        if (result != CUDA_SUCCESS && !log.empty()) {
            log_line("load refused (%d): %.*s", result, static_cast<int>(log.size()), log.data());
        }
    } else {
        options.deliver({}, result != CUDA_SUCCESS);
    }
    if (result != CUDA_SUCCESS) return result;
    table::Table table;
    std::size_t offset = 0;
    const auto* bytes = static_cast<const std::uint8_t*>(reply.table.data);
    const char* reason = readable ? table::decode(bytes, reply.table.size, &table, &offset)
                                  : "the answer's arguments cannot be read";
    if (reason != nullptr) {
        log_once("module table", "module table refused at byte %zu: %s", offset, reason);
        submit(wire::ModuleUnload{.module = module->number});
        return CUDA_ERROR_UNKNOWN;
    }
    const std::uint64_t number = module->number;
    const CUresult built = build(std::move(module), std::move(table), out);
    if (built != CUDA_SUCCESS) submit(wire::ModuleUnload{.module = number});
    return built;
}

CUresult unload_module(Module& module) {
    const std::uint64_t number = module.number;
    if (!end_handles(module)) return CUDA_ERROR_INVALID_HANDLE;
    if (module_used_by_graphs(number)) return CUDA_SUCCESS;
    return submit(wire::ModuleUnload{.module = number});
}

void forget_modules(Context& context) {
    forget_instances(context);
    std::vector<Module*> modules;
    for_each_object(Kind::module, [&](Object* object) {
        auto* module = static_cast<Module*>(object);
        if (module->context == &context) modules.push_back(module);
    });
    for (Module* module : modules) {
        forget_module(module->number);
        end_handles(*module);
    }
}

CUresult find_global(const Module& module, const char* name, CUdeviceptr* address, size_t* bytes) {
    if (name == nullptr || (address == nullptr && bytes == nullptr)) return CUDA_ERROR_INVALID_VALUE;
    const auto found = module.global_index.find(name);
    if (found == module.global_index.end()) {
        if (address != nullptr) *address = 0;  // as the driver does
        return CUDA_ERROR_NOT_FOUND;
    }
    const Global& global = module.globals[found->second];
    if (address != nullptr) *address = global.address;
    if (bytes != nullptr) *bytes = global.size;
    return CUDA_SUCCESS;
}

CUresult find_function(const Module& module, const char* name, Function*& function) {
    if (name == nullptr || *name == '\0') return CUDA_ERROR_INVALID_VALUE;
    const auto found = module.function_index.find(name);
    if (found == module.function_index.end()) return CUDA_ERROR_NOT_FOUND;
    function = module.functions[found->second];
    return CUDA_SUCCESS;
}

}  // namespace rgpu

using namespace rgpu;

namespace {

CUresult load(CUmodule* out, const void* data, unsigned count, const CUjit_option* options, void** values) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    module_binary::Binary binary;
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult r = binary_of(data, binary); r) return r;
    JitOptions jit;
    if (CUresult r = jit.parse(count, options, values); r) return r;
    Module* module = nullptr;
    if (CUresult r = load_module(*context, binary, jit, false, module); r) return r;
    *out = static_cast<CUmodule>(module->handle);
    return CUDA_SUCCESS;
}

// The module of a handle; require_session() first.
CUresult look_up(CUmodule handle, Module*& module) {
    if (CUresult r = require_session(); r) return r;
    module = find(handle);
    return module != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

extern "C" {

CUresult cuModuleLoad(CUmodule* module, const char* fname) {
    RGPU_PROFILED(18, "cuModuleLoad", module, fname);
    Context* context = nullptr;
    if (CUresult r = current(context); r) return api_.leave(r);
    if (module == nullptr || fname == nullptr) return api_.leave(CUDA_ERROR_INVALID_VALUE);
    std::string contents;
    if (!module_binary::read_file(fname, &contents)) return api_.leave(CUDA_ERROR_FILE_NOT_FOUND);
    contents.append(64, '\0');  // a header may be read although the file is shorter than one
    return api_.leave(load(module, contents.data(), 0, nullptr, nullptr));
}

CUresult cuModuleLoadData(CUmodule* module, const void* binary) {
  RGPU_PROFILED(19, "cuModuleLoadData", module, binary);
  return api_.leave(load(module, binary, 0, nullptr, nullptr));
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* binary, unsigned int numOptions, CUjit_option* options,
                            void** optionValues) {
    RGPU_PROFILED(20, "cuModuleLoadDataEx", module, binary, numOptions, options, optionValues);
    return api_.leave(load(module, binary, numOptions, options, optionValues));
}

CUresult cuModuleLoadFatBinary(CUmodule* module, const void* fatCubin) {
    RGPU_PROFILED(21, "cuModuleLoadFatBinary", module, fatCubin);
    return api_.leave(load(module, fatCubin, 0, nullptr, nullptr));
}

CUresult cuModuleUnload(CUmodule hmod) {
    RGPU_PROFILED(22, "cuModuleUnload", hmod);
    print_device_text();
    Module* module = nullptr;
    if (CUresult r = look_up(hmod, module); r) return api_.leave(r);
    if (module->library) return api_.leave(CUDA_ERROR_NOT_PERMITTED);  // it ends with its library
    return api_.leave(unload_module(*module));
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
    if (CUresult r = require_session(); r) return r;
    if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const char* value = std::getenv("CUDA_MODULE_LOADING");
    *mode = value != nullptr && std::strcmp(value, "EAGER") == 0 ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name) {
    RGPU_PROFILED(23, "cuModuleGetFunction", hfunc, hmod, name);
    Module* module = nullptr;
    Function* function = nullptr;
    if (CUresult r = look_up(hmod, module); r) return api_.leave(r);
    if (hfunc == nullptr) return api_.leave(CUDA_ERROR_INVALID_VALUE);
    if (CUresult r = find_function(*module, name, function); r) return api_.leave(r);
    *hfunc = static_cast<CUfunction>(function->handle);
    return api_.leave(CUDA_SUCCESS);
}

CUresult cuModuleGetFunctionCount(unsigned int* count, CUmodule mod) {
    Module* module = nullptr;
    if (CUresult r = look_up(mod, module); r) return r;
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = static_cast<unsigned>(module->functions.size());
    return CUDA_SUCCESS;
}

CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned int numFunctions, CUmodule mod) {
    Module* module = nullptr;
    if (CUresult r = look_up(mod, module); r) return r;
    if (functions == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const std::size_t count = std::min<std::size_t>(numFunctions, module->functions.size());
    for (std::size_t i = 0; i < count; ++i) functions[i] = static_cast<CUfunction>(module->functions[i]->handle);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* dptr, size_t* bytes, CUmodule hmod, const char* name) {
    Module* module = nullptr;
    if (CUresult r = look_up(hmod, module); r) return r;
    return find_global(*module, name, dptr, bytes);
}

}  // extern "C"
