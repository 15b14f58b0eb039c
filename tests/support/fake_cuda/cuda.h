/* A driver that is not there: prints its calls as JSON, a line each. Values are those of CUDA's cuda.h. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#define CUDA_VERSION 13000
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
constexpr CUresult CUDA_SUCCESS = 0;
typedef struct CUctx_st *CUcontext;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef int CUdevice;
typedef std::uint32_t cuuint32_t;
typedef std::uint64_t cuuint64_t;
constexpr CUresult CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_INVALID_IMAGE = 200, CUDA_ERROR_FILE_NOT_FOUND = 301,
                   CUDA_ERROR_LAUNCH_TIMEOUT = 702, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720;
enum CUdevice_attribute { CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95 };
enum CUmemorytype { CU_MEMORYTYPE_DEVICE = 2 };
struct CUDA_MEMCPY3D {
  CUmemorytype srcMemoryType, dstMemoryType;
  CUdeviceptr srcDevice, dstDevice;
  std::size_t srcPitch, srcHeight, dstPitch, dstHeight, WidthInBytes, Height, Depth;
};
struct CUDA_MEMSET_NODE_PARAMS { CUdeviceptr dst; std::size_t pitch; unsigned value, elementSize; std::size_t width, height; };
struct CUDA_KERNEL_NODE_PARAMS {
  CUfunction func;
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  void **kernelParams, **extra;
};
constexpr unsigned char CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC = 1;
struct CUgraphEdgeData { unsigned char from_port, to_port, type, reserved[5]; };
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
inline int encoded = 0, functions = 0, launched = 0, allocated = 0, nodes = 0;
inline int resident_blocks = 1 << 20; /* of a cooperative launch, on one multiprocessor */
inline unsigned stopped = 0; /* the word that says that a wait has reached its deadline */

template <class T> void print_list(const T *values, unsigned count, const char *end) {
  std::printf("[");
  for (unsigned i = 0; i < count; i++) std::printf("%s%lld", i ? ", " : "", (long long)values[i]);
  std::printf("]%s", end);
}
inline CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
inline CUresult cuModuleLoadData(CUmodule *, const void *image) { std::printf("[\"load\", \"%s\"]\n", (const char *)image); return 0; }
inline CUresult cuModuleLoad(CUmodule *module, const char *path) {
  *module = (CUmodule)path;
  std::printf("[\"load\", \"%s\"]\n", path);
  return 0;
}
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
inline CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return 0; }
inline CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return 0; }
inline CUresult cuCtxSynchronize() { return 0; }
inline CUresult cuStreamSynchronize(CUstream) { std::printf("[\"wait\"]\n"); return 0; }
inline CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute, CUdevice) { *value = 1; return 0; }
inline CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction, int, std::size_t) {
  *blocks = resident_blocks;
  return 0;
}
inline CUresult cuMemAlloc(CUdeviceptr *address, std::size_t bytes) {
  *address = (CUdeviceptr)++allocated << 40;
  std::printf("[\"allocate\", %zu]\n", bytes);
  return 0;
}
inline CUresult cuMemFree(CUdeviceptr address) { std::printf("[\"free\", %llu]\n", address); return 0; }
inline CUresult cuMemcpyHtoD(CUdeviceptr target, const void *source, std::size_t bytes) {
  unsigned long long sum = 0;
  for (std::size_t i = 0; i < bytes; i++) sum += (i + 1) * ((const unsigned char *)source)[i];
  std::printf("[\"upload\", %llu, %zu, %llu]\n", target, bytes, sum);
  return 0;
}
inline CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, std::size_t bytes) {
  std::memset(target, 0, bytes);
  ((unsigned *)target)[1] = stopped;
  std::printf("[\"read\", %llu]\n", source);
  return 0;
}
inline CUresult cuMemcpyDtoD(CUdeviceptr target, CUdeviceptr source, std::size_t bytes) {
  std::printf("[\"keep\", %llu, %llu, %zu]\n", target, source, bytes);
  return 0;
}
inline CUresult cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, std::size_t bytes, CUstream stream) {
  std::printf("[\"copy\", %llu, %llu, %zu, %d]\n", target, source, bytes, (int)(std::uintptr_t)stream);
  return 0;
}
inline void print_parameters(void **parameters) {
  const std::vector<int> &sizes = parameter_bytes.at(launched++);
  std::printf("[");
  for (std::size_t i = 0; i < sizes.size(); i++) {
    std::printf("%s\"", i ? ", " : "");
    for (int byte = 0; byte < sizes[i]; byte++) std::printf("%02x", ((unsigned char *)parameters[i])[byte]);
    std::printf("\"");
  }
  std::printf("]");
}
inline CUresult print_launch(const char *kind, CUfunction f, const unsigned *sizes, CUstream stream, void **parameters,
                             const char *end = "\n") {
  std::printf("[\"%s\", %d, ", kind, (int)(std::uintptr_t)f);
  print_list(sizes, 7, ", ");
  std::printf("%d, ", (int)(std::uintptr_t)stream);
  print_parameters(parameters);
  std::printf("]%s", end);
  return 0;
}
inline CUresult cuGraphCreate(CUgraph *graph, unsigned) { *graph = (CUgraph)1; nodes = 0; return 0; }
inline CUresult cuGraphDestroy(CUgraph) { return 0; }
inline CUresult cuGraphExecDestroy(CUgraphExec) { std::printf("[\"destroy\"]\n"); return 0; }
inline CUresult cuGraphInstantiateWithFlags(CUgraphExec *built, CUgraph, unsigned long long) {
  *built = (CUgraphExec)1;
  return 0;
}
inline CUresult cuGraphLaunch(CUgraphExec, CUstream stream) {
  std::printf("[\"graph\", %d]\n", (int)(std::uintptr_t)stream);
  return 0;
}
inline void add_node(CUgraphNode *node, const CUgraphNode *before, std::size_t count) { /* begins a row */
  *node = (CUgraphNode)(std::uintptr_t)++nodes;
  std::printf("[\"node\", ");
  print_list((const std::uintptr_t *)before, (unsigned)count, ", ");
}
inline CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph, const CUgraphNode *before, std::size_t count,
                                     const CUDA_KERNEL_NODE_PARAMS *given) {
  const unsigned sizes[] = {given->gridDimX,  given->gridDimY,  given->gridDimZ,      given->blockDimX,
                            given->blockDimY, given->blockDimZ, given->sharedMemBytes};
  add_node(node, before, count);
  print_launch("launch", given->func, sizes, nullptr, given->kernelParams, "]\n");
  return given->extra != nullptr;
}
inline CUresult cuGraphAddDependencies_v2(CUgraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edge,
                                          std::size_t count) {
  std::printf("[\"edge\", %d, %d, %d, %d, %d]\n", (int)(std::uintptr_t)*from, (int)(std::uintptr_t)*to, edge->from_port,
              edge->to_port, edge->type);
  return count != 1;
}
inline CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph, const CUgraphNode *before, std::size_t count,
                                     const CUDA_MEMSET_NODE_PARAMS *given, CUcontext) {
  add_node(node, before, count);
  std::printf("[\"fill\", %llu, %u, %zu, 0]]\n", given->dst, given->value, given->width);
  return given->elementSize != 1 || given->height != 1;
}
inline CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph, const CUgraphNode *before, std::size_t count,
                                     const CUDA_MEMCPY3D *given, CUcontext) {
  add_node(node, before, count);
  std::printf("[\"copy\", %llu, %llu, %zu, 0]]\n", given->dstDevice, given->srcDevice, given->WidthInBytes);
  return given->Height != 1 || given->Depth != 1;
}
inline CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                                          unsigned shared_bytes, CUstream stream, void **parameters) {
  const unsigned sizes[] = {x, y, z, bx, by, bz, shared_bytes};
  return print_launch("cooperative", f, sizes, stream, parameters);
}
inline CUresult cuLaunchKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                               unsigned shared_bytes, CUstream stream, void **parameters, void **extra) {
  const unsigned sizes[] = {x, y, z, bx, by, bz, shared_bytes};
  print_launch("launch", f, sizes, stream, parameters);
  return extra != nullptr;
}
#endif
