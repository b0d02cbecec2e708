// cuLink*: inputs are collected here; cuLinkComplete sends them, waits, and keeps the binary until cuLinkDestroy.
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "api.hpp"
#include "fatbin.hpp"
#include "handles.hpp"
#include "jit_options.hpp"

namespace rgpu {
namespace {

struct Input {
    std::uint32_t type;  // CUjitInputType
    std::string name;
    std::string data;
};

struct Link : Object {
    Link() : Object(Kind::link) {}
    JitOptions options;
    std::mutex lock;  // guards the fields below; not held while the answer is awaited
    std::vector<Input> inputs;
    bool completed = false;  // also while it is being completed: no input is accepted any more
    std::string binary;
};

void append(std::vector<std::uint8_t>& out, const void* data, std::size_t size) {
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    out.insert(out.end(), bytes, bytes + size);
}

// (u32 type, u32 name length, name, u64 length, data) of each input, in order.
std::vector<std::uint8_t> encode(const std::vector<Input>& inputs) {
    std::vector<std::uint8_t> out;
    for (const Input& input : inputs) {
        const auto name_size = static_cast<std::uint32_t>(input.name.size());
        const std::uint64_t size = input.data.size();
        append(out, &input.type, sizeof input.type);
        append(out, &name_size, sizeof name_size);
        append(out, input.name.data(), input.name.size());
        append(out, &size, sizeof size);
        append(out, input.data.data(), input.data.size());
    }
    return out;
}

// Whether the bytes can be of the given type; the driver refuses others when they are added.
bool plausible(std::uint32_t type, const std::string& data) {
    switch (type) {
        case CU_JIT_INPUT_PTX: return data.find(".version") != std::string::npos;
        case CU_JIT_INPUT_CUBIN:
        case CU_JIT_INPUT_OBJECT: return data.compare(0, 4, "\x7f" "ELF") == 0;
        case CU_JIT_INPUT_FATBINARY: return data.compare(0, 4, "\x50\xed\x55\xba") == 0;
        case CU_JIT_INPUT_LIBRARY: return data.compare(0, 7, "!<arch>") == 0;
        default: return true;
    }
}

CUresult look_up(CUlinkState handle, Link*& link) {
    if (CUresult r = require_session(); r) return r;
    link = static_cast<Link*>(find_object(handle, Kind::link));
    return link != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult add(Link& link, int type, const char* name, std::string data) {
    if (type < CU_JIT_INPUT_CUBIN || type >= CU_JIT_NUM_INPUT_TYPES) return CUDA_ERROR_INVALID_VALUE;
    const auto kind = static_cast<std::uint32_t>(type);
    if (!plausible(kind, data)) {
        link.options.deliver("error   : Binary format for key='0', ident='' is not recognized", true);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    const std::lock_guard hold(link.lock);
    if (link.completed) return CUDA_ERROR_INVALID_VALUE;
    link.inputs.push_back({kind, name != nullptr ? name : "", std::move(data)});
    return CUDA_SUCCESS;
}

// Sends the inputs and takes the binary out of the answer.
CUresult complete(Link& link) {
    const std::vector<std::uint8_t> payload = encode(link.inputs);
    wire::Link call;
    call.options = {link.options.encoded().data(), static_cast<std::uint32_t>(link.options.encoded().size())};
    Answer answer;
    const CUresult result = await(call, payload.data(), payload.size(), answer);
    wire::LinkReply reply;
    const bool readable = reply.read(answer.reply.data(), answer.reply.size());
    const std::string_view log =
        readable ? std::string_view(static_cast<const char*>(reply.log.data), reply.log.size) : std::string_view{};
    link.options.deliver(log, result != CUDA_SUCCESS);
    if (result != CUDA_SUCCESS) return result;
    if (!readable) return CUDA_ERROR_UNKNOWN;
    link.binary.assign(static_cast<const char*>(reply.image.data), reply.image.size);
    return CUDA_SUCCESS;
}

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuLinkCreate_v2(unsigned int numOptions, CUjit_option* options, void** optionValues, CUlinkState* stateOut) {
    Context* context = nullptr;
    if (CUresult r = current(context); r) return r;
    if (stateOut == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto link = std::make_unique<Link>();
    if (CUresult r = link->options.parse(numOptions, options, optionValues); r) return r;
    void* handle = enroll(std::move(link));
    if (handle == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *stateOut = static_cast<CUlinkState>(handle);
    return CUDA_SUCCESS;
}

CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void* data, size_t size, const char* name,
                          unsigned int numOptions, CUjit_option* options, void** optionValues) {
    Link* link = nullptr;
    if (CUresult r = look_up(state, link); r) return r;
    if (data == nullptr || size == 0 || size > module_binary::kLargest) return CUDA_ERROR_INVALID_VALUE;
    JitOptions own;  // checked; the wire carries no options of a single input
    if (CUresult r = own.parse(numOptions, options, optionValues); r) return r;
    return add(*link, type, name, std::string(static_cast<const char*>(data), size));
}

CUresult cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char* path, unsigned int numOptions,
                          CUjit_option* options, void** optionValues) {
    Link* link = nullptr;
    if (CUresult r = look_up(state, link); r) return r;
    if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
    JitOptions own;
    if (CUresult r = own.parse(numOptions, options, optionValues); r) return r;
    std::string contents;
    if (!module_binary::read_file(path, &contents)) return CUDA_ERROR_FILE_NOT_FOUND;
    return add(*link, type, path, std::move(contents));
}

CUresult cuLinkComplete(CUlinkState state, void** cubinOut, size_t* sizeOut) {
    if (CUresult r = require(); r) return r;
    Link* link = nullptr;
    if (CUresult r = look_up(state, link); r) return r;
    if (cubinOut == nullptr) return CUDA_ERROR_INVALID_VALUE;
    {
        const std::lock_guard hold(link->lock);
        if (link->completed) return CUDA_ERROR_INVALID_VALUE;
        link->completed = true;
    }
    if (CUresult r = complete(*link); r) return r;
    *cubinOut = link->binary.data();
    if (sizeOut != nullptr) *sizeOut = link->binary.size();
    return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState state) {
    Link* link = nullptr;
    if (CUresult r = look_up(state, link); r) return r;
    if (!retire(link)) return CUDA_ERROR_INVALID_HANDLE;
    const std::lock_guard hold(link->lock);
    link->inputs.clear();  // the object stays in the graveyard; its large members are freed now
    std::string().swap(link->binary);
    return CUDA_SUCCESS;
}

}  // extern "C"
