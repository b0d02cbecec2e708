// cuTensorMapEncode*: a pure function of its arguments, which only the driver of the server's GPU implements. Each set
// of arguments is sent once; the descriptors are cached. The address in the arguments is encoded, never accessed.
#include <cstring>
#include <list>
#include <unordered_map>

#include "device.hpp"
#include "session.hpp"

namespace rgpu {
namespace {

constexpr std::size_t kMostKept = 4096;  // descriptors

enum Form : std::uint32_t { TILED = 0, IM2COL = 1, IM2COL_WIDE = 2, REPLACE_ADDRESS = 3 };

// The arguments as encoded on the wire: little-endian values, one behind the other.
class Arguments {
 public:
  explicit Arguments(Form form) : form(form) {}
  template <class T>
  Arguments& add(T value) {
    return add(&value, 1);
  }
  template <class T>
  Arguments& add(const T* values, std::size_t count) {
    bytes.append(reinterpret_cast<const char*>(values), count * sizeof(T));
    return *this;
  }
  Form form;
  std::string bytes;
};

struct Known {
  std::mutex lock;
  std::unordered_map<std::string, CUtensorMap> maps;
  std::list<std::string> order;  // oldest first
};

Known& known() {
  static auto* k = new Known;
  return *k;
}

CUresult ask(const Arguments& arguments, CUtensorMap& map) {
  wire::TensorMap call{};
  call.form = arguments.form;
  call.arguments = {arguments.bytes.data(), static_cast<std::uint32_t>(arguments.bytes.size())};
  Answer answer;
  if (CUresult r = await(call, nullptr, 0, answer); r) return r;
  wire::TensorMapReply reply;
  if (!reply.read(answer.reply.data(), answer.reply.size()) || reply.map.size != sizeof map) return CUDA_ERROR_UNKNOWN;
  std::memcpy(&map, reply.map.data, sizeof map);
  return CUDA_SUCCESS;
}

CUresult encode(const Arguments& arguments, CUtensorMap* out) {
  const std::string key = static_cast<char>('0' + arguments.form) + arguments.bytes;
  Known& k = known();
  {
    std::lock_guard guard(k.lock);
    if (auto it = k.maps.find(key); it != k.maps.end()) {
      *out = it->second;
      return CUDA_SUCCESS;
    }
  }
  CUtensorMap map{};
  if (CUresult r = ask(arguments, map); r) return r;
  *out = map;
  std::lock_guard guard(k.lock);
  if (k.maps.emplace(key, map).second) k.order.push_back(key);
  if (k.order.size() > kMostKept) {
    k.maps.erase(k.order.front());
    k.order.pop_front();
  }
  return CUDA_SUCCESS;
}

// Encodes the common arguments of all forms. Only the sizes of the arrays to be read are checked: the driver checks the
// rest.
CUresult begin(Arguments& a, const CUtensorMap* map, CUtensorMapDataType type, std::uint32_t rank, const void* address,
               const std::uint64_t* dimensions, const std::uint64_t* strides, const std::uint32_t* element_strides) {
  if (CUresult r = require(); r) return r;
  if (!map || !rank || rank > 5 || !dimensions || (rank > 1 && !strides) || !element_strides)
    return CUDA_ERROR_INVALID_VALUE;
  a.add<std::int32_t>(type).add(rank).add(reinterpret_cast<std::uint64_t>(address));
  a.add(dimensions, rank).add(strides, rank - 1);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace rgpu

using namespace rgpu;

extern "C" {

CUresult cuTensorMapEncodeTiled(CUtensorMap* tensorMap, CUtensorMapDataType tensorDataType, uint32_t tensorRank,
                                void* globalAddress, const uint64_t* globalDim, const uint64_t* globalStrides,
                                const uint32_t* boxDim, const uint32_t* elementStrides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2Promotion,
                                CUtensorMapFloatOOBfill oobFill) {
  Arguments a(TILED);
  if (CUresult r = begin(a, tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides, elementStrides);
      r)
    return r;
  if (!boxDim) return CUDA_ERROR_INVALID_VALUE;
  a.add(boxDim, tensorRank).add(elementStrides, tensorRank);
  a.add<std::int32_t>(interleave).add<std::int32_t>(swizzle).add<std::int32_t>(l2Promotion).add<std::int32_t>(oobFill);
  return encode(a, tensorMap);
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap* tensorMap, CUtensorMapDataType tensorDataType, uint32_t tensorRank,
                                 void* globalAddress, const uint64_t* globalDim, const uint64_t* globalStrides,
                                 const int* pixelBoxLowerCorner, const int* pixelBoxUpperCorner,
                                 uint32_t channelsPerPixel, uint32_t pixelsPerColumn, const uint32_t* elementStrides,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill) {
  Arguments a(IM2COL);
  if (CUresult r = begin(a, tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides, elementStrides);
      r)
    return r;
  if (tensorRank < 3 || !pixelBoxLowerCorner || !pixelBoxUpperCorner) return CUDA_ERROR_INVALID_VALUE;
  a.add(pixelBoxLowerCorner, tensorRank - 2).add(pixelBoxUpperCorner, tensorRank - 2);
  a.add(channelsPerPixel).add(pixelsPerColumn).add(elementStrides, tensorRank);
  a.add<std::int32_t>(interleave).add<std::int32_t>(swizzle).add<std::int32_t>(l2Promotion).add<std::int32_t>(oobFill);
  return encode(a, tensorMap);
}

CUresult cuTensorMapEncodeIm2colWide(CUtensorMap* tensorMap, CUtensorMapDataType tensorDataType, uint32_t tensorRank,
                                     void* globalAddress, const uint64_t* globalDim, const uint64_t* globalStrides,
                                     int pixelBoxLowerCornerWidth, int pixelBoxUpperCornerWidth,
                                     uint32_t channelsPerPixel, uint32_t pixelsPerColumn,
                                     const uint32_t* elementStrides, CUtensorMapInterleave interleave,
                                     CUtensorMapIm2ColWideMode mode, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill) {
  Arguments a(IM2COL_WIDE);
  if (CUresult r = begin(a, tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides, elementStrides);
      r)
    return r;
  a.add(pixelBoxLowerCornerWidth).add(pixelBoxUpperCornerWidth).add(channelsPerPixel).add(pixelsPerColumn);
  a.add(elementStrides, tensorRank).add<std::int32_t>(interleave).add<std::int32_t>(mode);
  a.add<std::int32_t>(swizzle).add<std::int32_t>(l2Promotion).add<std::int32_t>(oobFill);
  return encode(a, tensorMap);
}

CUresult cuTensorMapReplaceAddress(CUtensorMap* tensorMap, void* globalAddress) {
  if (CUresult r = require(); r) return r;
  if (!tensorMap) return CUDA_ERROR_INVALID_VALUE;
  Arguments a(REPLACE_ADDRESS);
  a.add(tensorMap, 1).add(reinterpret_cast<std::uint64_t>(globalAddress));
  return encode(a, tensorMap);
}

}  // extern "C"
