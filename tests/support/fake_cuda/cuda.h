/* A driver that is not there: prints its calls as JSON, a line each. Values are those of CUDA's cuda.h. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
constexpr CUresult CUDA_SUCCESS = 0;
enum CUfunction_attribute { CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0, CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1, CU_TENSOR_MAP_DATA_TYPE_UINT32 = 2,
  CU_TENSOR_MAP_DATA_TYPE_UINT64 = 4, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 = 11
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE = 0, CU_TENSOR_MAP_SWIZZLE_32B = 1, CU_TENSOR_MAP_SWIZZLE_64B = 2, CU_TENSOR_MAP_SWIZZLE_128B = 3
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };
struct CUtensorMap { alignas(64) std::uint64_t opaque[16]; };

inline std::vector<std::vector<int>> parameter_bytes; /* of each launch */
inline int encoded = 0, functions = 0, launched = 0;

template <class T> void print_list(const T *values, unsigned count, const char *end) {
  std::printf("[");
  for (unsigned i = 0; i < count; i++) std::printf("%s%lld", i ? ", " : "", (long long)values[i]);
  std::printf("]%s", end);
}
inline CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
inline CUresult cuModuleLoadData(CUmodule *, const void *image) { std::printf("[\"load\", \"%s\"]\n", (const char *)image); return 0; }
inline CUresult cuModuleUnload(CUmodule) { return 0; }
inline CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
  *function = (CUfunction)(std::uintptr_t)(++functions);
  std::printf("[\"function\", \"%s\"]\n", name);
  return 0;
}
inline CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) {
  std::printf("[\"attribute\", %d, %d, %d]\n", (int)(std::uintptr_t)f, attribute, value);
  return 0;
}
inline CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, std::size_t bytes, CUstream stream) {
  std::printf("[\"fill\", %llu, %d, %zu, %d]\n", address, value, bytes, (int)(std::uintptr_t)stream);
  return 0;
}
inline CUresult print_map(CUtensorMap *map, int type, std::uint32_t rank, void *address, const std::uint64_t *extents,
                          const std::uint64_t *strides) {
  std::memset(map, ++encoded, sizeof *map);
  std::printf("%d, %u, %llu, ", type, rank, (unsigned long long)address);
  print_list(extents, rank, ", ");
  print_list(strides, rank > 1 ? rank - 1 : 1, ", ");
  return (std::uintptr_t)map % 64 != 0;
}
inline CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, std::uint32_t rank, void *address,
                                       const std::uint64_t *extents, const std::uint64_t *strides, const std::uint32_t *box,
                                       const std::uint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  std::printf("[\"tiled\", ");
  CUresult status = print_map(map, type, rank, address, extents, strides);
  print_list(box, rank, ", ");
  print_list(steps, rank, ", ");
  std::printf("%d, %d, %d, %d]\n", interleave, swizzle, promotion, fill);
  return status;
}
inline CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, std::uint32_t rank, void *address,
                                        const std::uint64_t *extents, const std::uint64_t *strides, const int *lower,
                                        const int *upper, std::uint32_t channels, std::uint32_t pixels,
                                        const std::uint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                        CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  std::printf("[\"im2col\", ");
  CUresult status = print_map(map, type, rank, address, extents, strides);
  print_list(lower, rank - 2, ", ");
  print_list(upper, rank - 2, ", ");
  std::printf("%u, %u, ", channels, pixels);
  print_list(steps, rank, ", ");
  std::printf("%d, %d, %d, %d]\n", interleave, swizzle, promotion, fill);
  return status;
}
inline CUresult cuLaunchKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared_bytes, CUstream stream, void **parameters, void **extra) {
  std::printf("[\"launch\", %d, [%u, %u, %u, %u, %u, %u, %u], %d, [", (int)(std::uintptr_t)f, x, y, z, bx, by, bz, shared_bytes,
              (int)(std::uintptr_t)stream);
  const std::vector<int> &sizes = parameter_bytes.at(launched++);
  for (std::size_t i = 0; i < sizes.size(); i++) {
    std::printf("%s\"", i ? ", " : "");
    for (int byte = 0; byte < sizes[i]; byte++) std::printf("%02x", ((unsigned char *)parameters[i])[byte]);
    std::printf("\"");
  }
  std::printf("]]\n");
  return extra != nullptr;
}
#endif
