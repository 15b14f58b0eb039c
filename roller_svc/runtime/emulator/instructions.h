// Host implementations of the wrappers of codegen/cuda/instructions.py and of CUDA's warp, bit and memory functions.
// Functions that wait or access memory are in the runtime; `line` is the caller's.
#pragma once

#define EMULATOR_LINE int line = __builtin_LINE()

namespace emulator {

constexpr int WARP = EMULATOR_WARP;  // 32, or 64 where the text is HIP's
constexpr unsigned int WHOLE_WARP = 0xffffffffu;

// Data of a shuffle or a vote, one entry a lane; lanes that the block does not have are 0xff bytes.
struct Votes {
  unsigned long long of[WARP];
};

// All-gather in the caller's warp: every lane contributes a value and gets all of them; the caller's own is at `lane`.
const Votes &exchanged(const char *what, unsigned int mask, int width, unsigned long long value, int line);
void sync_warp(unsigned int mask, int line);
void yield_every_second_call();  // every second call yields to other threads
unsigned int lane();
unsigned int lanes();  // a warp's; the last one of a block may have fewer than WARP

// `available`: bytes up to the end of the array, if the compiler knows.
void copy(void *shared, unsigned long available, const void *memory, unsigned int bytes, bool inside, int line);
void await(unsigned int pending);
void load_matrix(unsigned int *words, const void *row, unsigned long available, int count, bool transposed, int line);

}  // namespace emulator

// cp.async ------------------------------------------------------------------------------------------------------------
#define EMULATOR_AVAILABLE(at) __builtin_dynamic_object_size(at, 0)
#define EMULATOR_COPY(name, bytes) \
  __forceinline__ void name(void *shared, const void *memory, bool inside, EMULATOR_LINE) { \
    emulator::copy(shared, EMULATOR_AVAILABLE(shared), memory, bytes, inside, line); \
  }
EMULATOR_COPY(copy_async_4, 4)
EMULATOR_COPY(copy_async_8, 8)
EMULATOR_COPY(copy_async_16, 16)
#undef EMULATOR_COPY
void commit_copies();
template <int PENDING> inline void await_copies() {
  static_assert(PENDING >= 0, "a number of groups");
  emulator::await(PENDING);
}

// ldmatrix ------------------------------------------------------------------------------------------------------------
#define EMULATOR_LOAD_MATRIX(name, count, transposed) \
  __forceinline__ void name(unsigned int *words, const void *row, EMULATOR_LINE) { \
    emulator::load_matrix(words, row, EMULATOR_AVAILABLE(row), count, transposed, line); \
  }
EMULATOR_LOAD_MATRIX(load_matrix_1, 1, false)
EMULATOR_LOAD_MATRIX(load_matrix_2, 2, false)
EMULATOR_LOAD_MATRIX(load_matrix_4, 4, false)
EMULATOR_LOAD_MATRIX(load_matrix_1_transposed, 1, true)
EMULATOR_LOAD_MATRIX(load_matrix_2_transposed, 2, true)
EMULATOR_LOAD_MATRIX(load_matrix_4_transposed, 4, true)
#undef EMULATOR_LOAD_MATRIX
#undef EMULATOR_AVAILABLE

// mma: d += a x b -----------------------------------------------------------------------------------------------------
#define EMULATOR_MMA(name, type) void name(type *d, const unsigned int *a, const unsigned int *b, EMULATOR_LINE);
EMULATOR_MMA(mma_m16n8k16_f16, float)
EMULATOR_MMA(mma_m16n8k8_f16, float)
EMULATOR_MMA(mma_m16n8k16_bf16, float)
EMULATOR_MMA(mma_m16n8k8_bf16, float)
EMULATOR_MMA(mma_m16n8k8_tf32, float)
EMULATOR_MMA(mma_m16n8k32_s8s8, int)
EMULATOR_MMA(mma_m16n8k32_s8u8, int)
EMULATOR_MMA(mma_m16n8k32_u8s8, int)
EMULATOR_MMA(mma_m16n8k32_u8u8, int)
EMULATOR_MMA(mma_m8n8k16_s8s8, int)
EMULATOR_MMA(mma_m8n8k16_s8u8, int)
EMULATOR_MMA(mma_m8n8k16_u8s8, int)
EMULATOR_MMA(mma_m8n8k16_u8u8, int)
EMULATOR_MMA(mma_m16n8k32_e4m3e4m3, float)
EMULATOR_MMA(mma_m16n8k32_e4m3e5m2, float)
EMULATOR_MMA(mma_m16n8k32_e5m2e4m3, float)
EMULATOR_MMA(mma_m16n8k32_e5m2e5m2, float)
#undef EMULATOR_MMA
void mma_m16n8k8_f64(double *d, const double *a, const double *b, EMULATOR_LINE);
void mma_m8n8k4_f64(double *d, const double *a, const double *b, EMULATOR_LINE);

// MFMA: d += a x b of a wave
#define EMULATOR_MFMA(name, sum, element) void name(sum *d, const element *a, const element *b, EMULATOR_LINE);
EMULATOR_MFMA(mfma_16x16x16_f16, float, unsigned short)
EMULATOR_MFMA(mfma_16x16x16_bf16, float, unsigned short)
EMULATOR_MFMA(mfma_16x16x4_f32, float, float)
EMULATOR_MFMA(mfma_16x16x16_s8, int, signed char)
EMULATOR_MFMA(mfma_16x16x32_s8, int, signed char)
EMULATOR_MFMA(mfma_16x16x4_f64, double, double)
#undef EMULATOR_MFMA

inline unsigned int round_tf32(unsigned int bits) {  // to nearest, ties away from zero
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return nan ? 0x7fffe000 : (bits + 0x1000) & ~0x1fffu;
}

// warps ---------------------------------------------------------------------------------------------------------------
inline void __syncwarp(unsigned int mask = emulator::WHOLE_WARP, EMULATOR_LINE) {
  emulator::sync_warp(mask, line);
}
inline int elect_one(EMULATOR_LINE) {
  emulator::exchanged("elect.sync", emulator::WHOLE_WARP, emulator::WARP, 0, line);
  return emulator::lane() == 0;
}
inline unsigned int __ballot_sync(unsigned int mask, int predicate, EMULATOR_LINE) {
  const auto &votes = emulator::exchanged("__ballot_sync", mask, emulator::WARP, predicate != 0, line);
  unsigned int ballot = 0;
  for (unsigned int i = 0; i < emulator::lanes(); i++) ballot |= (votes.of[i] != 0 ? 1u : 0u) << i;
  return ballot;
}
inline int __any_sync(unsigned int mask, int predicate, EMULATOR_LINE) {
  return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned int mask, int predicate, EMULATOR_LINE) {
  return __ballot_sync(mask, predicate == 0, line) == 0;
}

namespace emulator {
// The value of the lane `from`; a lane that is not one of the warp's gives the caller its own.
template <class T>
inline T shuffled(const char *what, unsigned int mask, T value, unsigned int from, int width, int line) {
  static_assert(sizeof(T) <= 8, "one entry a lane");
  unsigned long long entry = 0;
  __builtin_memcpy(&entry, &value, sizeof value);
  const Votes &votes = exchanged(what, mask, width, entry, line);
  __builtin_memcpy(&value, &votes.of[from < WARP ? from : lane()], sizeof value);
  return value;
}
}  // namespace emulator
#define EMULATOR_SHUFFLES(type) \
  inline type __shfl_sync(unsigned int mask, type value, int from, int width = emulator::WARP, EMULATOR_LINE) { \
    return emulator::shuffled("__shfl_sync", mask, value, from & (emulator::WARP - 1), width, line); \
  } \
  inline type __shfl_xor_sync(unsigned int mask, type value, int lanes, int width = emulator::WARP, EMULATOR_LINE) { \
    return emulator::shuffled("__shfl_xor_sync", mask, value, emulator::lane() ^ lanes, width, line); \
  } \
  inline type __shfl_down_sync(unsigned int mask, type value, unsigned int by, int width = emulator::WARP, \
                               EMULATOR_LINE) { \
    return emulator::shuffled("__shfl_down_sync", mask, value, emulator::lane() + by, width, line); \
  } \
  inline type __shfl_up_sync(unsigned int mask, type value, unsigned int by, int width = emulator::WARP, \
                             EMULATOR_LINE) { \
    return emulator::shuffled("__shfl_up_sync", mask, value, emulator::lane() - by, width, line); \
  } \
  inline type __shfl_xor(type value, int lanes, EMULATOR_LINE) { /* HIP's */ \
    return emulator::shuffled("__shfl_xor", emulator::WHOLE_WARP, value, emulator::lane() ^ lanes, emulator::WARP, \
                              line); \
  } \
  inline type __shfl_up(type value, unsigned int by, EMULATOR_LINE) { /* HIP's */ \
    return emulator::shuffled("__shfl_up", emulator::WHOLE_WARP, value, emulator::lane() - by, emulator::WARP, line); \
  }
EMULATOR_SHUFFLES(int)
EMULATOR_SHUFFLES(unsigned int)
EMULATOR_SHUFFLES(long long)
EMULATOR_SHUFFLES(unsigned long long)
EMULATOR_SHUFFLES(float)
EMULATOR_SHUFFLES(double)
#undef EMULATOR_SHUFFLES

// bits ----------------------------------------------------------------------------------------------------------------
inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
  unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned int result = 0;
  for (int i = 0; i < 4; i++) result |= (unsigned int)(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
// cvt.rzi saturates, and NaN gives 0
inline int __float2int_rz(float a) {
  return a != a ? 0 : a < -2147483648.0f ? -2147483647 - 1 : a >= 2147483648.0f ? 2147483647 : (int)a;
}
inline unsigned int __float2uint_rz(float a) {
  return a != a || a <= 0.0f ? 0 : a >= 4294967296.0f ? 4294967295u : (unsigned int)a;
}
inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz((unsigned int)bits) : 32; }
inline unsigned int __brev(unsigned int bits) {
  bits = (bits >> 1 & 0x55555555) | (bits & 0x55555555) << 1;
  bits = (bits >> 2 & 0x33333333) | (bits & 0x33333333) << 2;
  bits = (bits >> 4 & 0x0f0f0f0f) | (bits & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(bits);
}

// memory --------------------------------------------------------------------------------------------------------------
template <class T> inline T __ldg(const T *at) { return *at; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }

// atomics: give what was there
namespace emulator {
// Another thread may have come in between since the caller read `before`.
template <class T> inline T swapped(T *at, T before, T after) {
  yield_every_second_call();
  __atomic_compare_exchange_n(at, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return before;
}
// No thread runs between the read and the write: fibers switch only where they wait or give way.
template <class T, class Bits> inline T added(T *at, T value) {
  Bits bits = __atomic_load_n((Bits *)at, __ATOMIC_RELAXED);
  T before, after;
  __builtin_memcpy(&before, &bits, sizeof before);
  after = before + value;
  __builtin_memcpy(&bits, &after, sizeof after);
  __atomic_store_n((Bits *)at, bits, __ATOMIC_RELAXED);
  return before;
}
}  // namespace emulator
inline int atomicCAS(int *at, int before, int after) { return emulator::swapped(at, before, after); }
inline unsigned short atomicCAS(unsigned short *at, unsigned short before, unsigned short after) {
  return emulator::swapped(at, before, after);
}
inline unsigned int atomicCAS(unsigned int *at, unsigned int before, unsigned int after) {
  return emulator::swapped(at, before, after);
}
inline unsigned long long atomicCAS(unsigned long long *at, unsigned long long before, unsigned long long after) {
  return emulator::swapped(at, before, after);
}
// a load past the first cache, of which there is none here
template <class T> inline T __ldcg(const T *from) { return *from; }

inline unsigned int atomicAdd(unsigned int *at, unsigned int value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
inline int atomicAdd(int *at, int value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
inline float atomicAdd(float *at, float value) { return emulator::added<float, unsigned int>(at, value); }
inline double atomicAdd(double *at, double value) { return emulator::added<double, unsigned long long>(at, value); }


namespace emulator {
template <class T, bool GREATER> inline T ordered(T *at, T value) {
  T before = __atomic_load_n(at, __ATOMIC_RELAXED);
  __atomic_store_n(at, (GREATER ? value > before : value < before) ? value : before, __ATOMIC_RELAXED);
  return before;
}
}  // namespace emulator
#define EMULATOR_ATOMIC_ORDER(type) \
  inline type atomicMin(type *at, type value) { return emulator::ordered<type, false>(at, value); } \
  inline type atomicMax(type *at, type value) { return emulator::ordered<type, true>(at, value); }
EMULATOR_ATOMIC_ORDER(int)
EMULATOR_ATOMIC_ORDER(unsigned int)
EMULATOR_ATOMIC_ORDER(long long)
EMULATOR_ATOMIC_ORDER(unsigned long long)
#undef EMULATOR_ATOMIC_ORDER

// the lesser and the greater
#define EMULATOR_ORDER(type) \
  inline type min(type a, type b) { return a < b ? a : b; } \
  inline type max(type a, type b) { return a > b ? a : b; }
EMULATOR_ORDER(int)
EMULATOR_ORDER(unsigned int)
EMULATOR_ORDER(long long)
EMULATOR_ORDER(unsigned long long)
#undef EMULATOR_ORDER
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }

#undef EMULATOR_LINE
