// CUDA C++ and HIP for a CPU's compiler: included before the kernel's source.
//
// Declares CUDA's keywords, built-in variables and functions, and a host implementation of each named wrapper of an
// instruction. No system header is included, so that no macro collides with a kernel's names. The runtime is in
// runtime.cpp; the interface between the two is namespace emulator.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
// Inside a function `thread_local` is static, and after `extern` it is a declaration, just as __shared__ is. All shared
// memory of the program thereby lies in one segment, which the runtime finds and poisons before every block.
#define __shared__ thread_local __attribute__((used))
// A barrier is known by its line: threads of a block that wait on different lines have diverged.
#define __syncthreads() emulator::barrier(__LINE__)
#define __syncthreads_or(cond) emulator::any_thread(cond, __LINE__)

#include "tensor_map.h"
#include "vectors.h"

struct uint3 {
  unsigned int x, y, z;
};
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

// What a launch and its buffers are; program.cpp's tables, written by the driver, follow the kernel's text.
enum Role { INPUT, OUTPUT, WORKSPACE, UPDATED };  // UPDATED: an output that has an input's memory
struct Buffer {
  const char *name;
  Role role;
  unsigned long bytes;
  bool constant;  // no launch of a call writes it
};
struct Launch {
  const char *name;
  void (*run)(void *const *buffers);  // one thread
  uint3 grid, block;
  unsigned long dynamic_bytes;
  unsigned char *(*dynamic)();  // where dynamic shared memory lies; null: no kernel has any
  const int *zeroed;            // numbers of buffers, -1 ends them
  unsigned int cluster;         // neighbouring blocks, along x, that run together
  bool cooperative;             // all blocks run together
  bool programmatic;            // it may start before the launches before it end, and each thread waits for these
};
struct Program {
  const Buffer *buffers;
  int buffer_count;
  const Launch *launches;
  int launch_count;
  unsigned long dynamic_bytes;  // the most that a launch asks for
};

// An argument that becomes a pointer to whatever the parameter points to.
struct Argument {
  void *at;
  template <class T> operator T *() const { return static_cast<T *>(at); }
};

// Dynamic shared memory is followed by a redzone of this size, which must not be written.
constexpr unsigned long DYNAMIC_SLACK_BYTES = 1024;

// Initialise a variable without a value to NaN, which sums and maxima propagate. text.py inserts the calls.
template <class T> __forceinline__ void poison(T &variable) { __builtin_memset(&variable, 0xff, sizeof variable); }

void barrier(int line);
int any_thread(int cond, int line);  // whether it holds in any thread of the block
unsigned int event_add(unsigned int *word, unsigned int count, bool releases, bool acquires, int line);
unsigned int event_load(const unsigned int *word, bool acquires, int line);
void yield_thread();
void grid_wait();
void event_wait(const unsigned int *word, unsigned int target, bool acquires, unsigned int number, unsigned int row,
                int line);
[[noreturn]] void out_of_range(long long index, int check);

}  // namespace emulator

extern const emulator::Program emulator_program;

#include "hopper.h"
#include "instructions.h"

// wrappers of codegen/cuda/event_instructions.py; the relaxed ones are for mutants
#define EMULATOR_EVENTS(suffix, ordered) \
  inline void event_arrive##suffix(unsigned int *sync, unsigned int event, unsigned int tasks, \
                                   int line = __builtin_LINE()) { \
    emulator::event_add(sync + 32 * (event + 1), tasks, ordered, false, line); \
  } \
  inline unsigned int event_finish##suffix(unsigned int *sync, unsigned int event, int line = __builtin_LINE()) { \
    return emulator::event_add(sync + 32 * (event + 1), 1, ordered, ordered, line); \
  } \
  inline int event_wait##suffix(unsigned int *sync, unsigned int event, unsigned int target, unsigned int row, \
                                int line = __builtin_LINE()) { \
    emulator::event_wait(sync + 32 * (event + 1), target, ordered, event, row, line); \
    return 1; \
  }
EMULATOR_EVENTS(, true)
EMULATOR_EVENTS(_relaxed, false)
#undef EMULATOR_EVENTS
// The parts of event_wait, for a test of its text: a poll lets other threads run, and takes a millisecond.
inline unsigned int load_acquire(const unsigned int *word, int line = __builtin_LINE()) {
  return emulator::event_load(word, true, line);
}
inline unsigned int load_relaxed(const unsigned int *word, int line = __builtin_LINE()) {
  return emulator::event_load(word, false, line);
}
inline unsigned int exchange_relaxed(unsigned int *word, unsigned int other) {
  unsigned int before = *word;
  *word = other;
  return before;
}
inline void sleep_ns(unsigned int) { emulator::yield_thread(); }
inline unsigned long long timer_ns() {
  static unsigned long long now;
  return now += 1000000;
}

// bit casts
inline unsigned int __float_as_uint(float a) { unsigned int u; __builtin_memcpy(&u, &a, 4); return u; }
// Products that are rounded before they are added to: a volatile keeps the compiler from fusing them.
inline float __fmul_rn(float a, float b) { volatile float product = a * b; return product; }
inline double __dmul_rn(double a, double b) { volatile double product = a * b; return product; }
inline int __float_as_int(float a) { int u; __builtin_memcpy(&u, &a, 4); return u; }
inline float __uint_as_float(unsigned int u) { float a; __builtin_memcpy(&a, &u, 4); return a; }
inline float __int_as_float(int u) { float a; __builtin_memcpy(&a, &u, 4); return a; }
inline long long __double_as_longlong(double a) { long long u; __builtin_memcpy(&u, &a, 8); return u; }
inline double __longlong_as_double(long long u) { double a; __builtin_memcpy(&a, &u, 8); return a; }

// host implementations of the wrappers of codegen/cuda/helpers.py
inline float f16_to_f32(unsigned short h) {
  unsigned int sign = (unsigned int)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
  float tiny = (float)fraction * 0x1p-24f;
  return sign ? -tiny : tiny;
}
inline unsigned short f32_to_f16(float a) {  // to nearest even
  unsigned int u = __float_as_uint(a), sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return (unsigned short)(sign | 0x7fff);
  if (u >= 0x477ff000) return (unsigned short)(sign | 0x7c00);
  if (u < 0x38800000)  // a subnormal: the addition rounds it to multiples of 2^-24
    return (unsigned short)(sign | (__float_as_uint(__uint_as_float(u) + 0.5f) - 0x3f000000));
  return (unsigned short)(sign | ((u + 0xfff + (u >> 13 & 1)) >> 13) - (112 << 10));
}
inline unsigned short f32_to_bf16(float a) {  // to nearest even
  unsigned int u = __float_as_uint(a);
  return (unsigned short)(a != a ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float exp2_approx(float a) {  // flushes subnormal inputs and results to 0
  const float power = __builtin_exp2f(__builtin_fabsf(a) < 0x1p-126f ? 0.0f : a);
  return power < 0x1p-126f ? 0.0f : power;
}
inline float rcp_approx(float a) {  // flushes subnormal inputs and results to 0
  const float inverse = 1.0f / (__builtin_fabsf(a) < 0x1p-126f ? __builtin_copysignf(0.0f, a) : a);
  return __builtin_fabsf(inverse) < 0x1p-126f ? __builtin_copysignf(0.0f, inverse) : inverse;
}
inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
inline float max_f32(float a, float b) { return a > b || a != a ? a : b; }
inline float min_f32(float a, float b) { return a < b || a != a ? a : b; }
inline unsigned int pack_f16(float low, float high) {
  return f32_to_f16(low) | (unsigned int)f32_to_f16(high) << 16;
}
inline unsigned int pack_bf16(float low, float high) {
  return f32_to_bf16(low) | (unsigned int)f32_to_bf16(high) << 16;
}
inline float bf16_half(unsigned int word) { return __uint_as_float(word << 16); }
#define EMULATOR_PAIR(of_f16, of_bf16, sign) \
  inline unsigned int of_f16(unsigned int a, unsigned int b) { \
    return pack_f16(f16_to_f32(a & 0xffff) sign f16_to_f32(b & 0xffff), f16_to_f32(a >> 16) sign f16_to_f32(b >> 16)); \
  } \
  inline unsigned int of_bf16(unsigned int a, unsigned int b) { \
    return pack_bf16(bf16_half(a) sign bf16_half(b), bf16_half(a >> 16) sign bf16_half(b >> 16)); \
  }
EMULATOR_PAIR(add_f16x2, add_bf16x2, +)
EMULATOR_PAIR(sub_f16x2, sub_bf16x2, -)
EMULATOR_PAIR(mul_f16x2, mul_bf16x2, *)
#undef EMULATOR_PAIR
inline unsigned int and_or(unsigned int a, unsigned int mask, unsigned int bits) { return (a & mask) | bits; }
inline unsigned int fma_f16x2(unsigned int a, unsigned int b, unsigned int c) {  // rounds twice, but not integers
  return pack_f16(f16_to_f32(a & 0xffff) * f16_to_f32(b & 0xffff) + f16_to_f32(c & 0xffff),
                  f16_to_f32(a >> 16) * f16_to_f32(b >> 16) + f16_to_f32(c >> 16));
}
inline unsigned short e4m3_bits_to_f16(unsigned int byte) {
  unsigned int magnitude = byte & 127, sign = (byte & 128) << 8;
  return magnitude == 127 ? 0x7fff : f32_to_f16(f16_to_f32((unsigned short)(sign | magnitude << 7)) * 256.0f);
}
inline unsigned int e4m3x2_to_f16x2(unsigned short bytes) {
  return e4m3_bits_to_f16(bytes & 255) | (unsigned int)e4m3_bits_to_f16(bytes >> 8) << 16;
}
// red.add of a pair: both halves are added and rounded on their own.
#define EMULATOR_ADD_PAIR(name, add) \
  inline void name(unsigned int *at, unsigned int pair) { \
    unsigned int sums = add(__atomic_load_n(at, __ATOMIC_RELAXED), pair); \
    __atomic_store_n(at, sums, __ATOMIC_RELAXED); \
  }
EMULATOR_ADD_PAIR(add_pair_f16, add_f16x2)
EMULATOR_ADD_PAIR(add_pair_bf16, add_bf16x2)
#undef EMULATOR_ADD_PAIR
inline unsigned char f32_to_e4m3(float a) {  // to nearest even, saturating at 448
  unsigned int u = __float_as_uint(a), sign = u >> 24 & 128;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return 127;
  if (u >= 0x43e00000) return (unsigned char)(sign | 126);
  if (u < 0x3c800000)  // a subnormal: the addition rounds it to multiples of 2^-9
    return (unsigned char)(sign | (__float_as_uint(__uint_as_float(u) + 0x1p14f) - 0x46800000));
  u = ((u + 0x7ffff + (u >> 20 & 1)) >> 20) - 960;
  return (unsigned char)(sign | (u > 126 ? 126 : u));
}
inline unsigned char f32_to_e5m2(float a) {  // to nearest even, saturating at 57344
  unsigned int u = __float_as_uint(a), sign = u >> 24 & 128;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return 127;
  if (u >= 0x47600000) return (unsigned char)(sign | 123);
  if (u < 0x38800000)  // a subnormal: the addition rounds it to multiples of 2^-16
    return (unsigned char)(sign | (__float_as_uint(__uint_as_float(u) + 0x1p7f) - 0x43000000));
  u = ((u + 0xfffff + (u >> 21 & 1)) >> 21) - 448;
  return (unsigned char)(sign | (u > 123 ? 123 : u));
}
inline float mul_rn_f32(float a, float b) { return __fmul_rn(a, b); }
inline double mul_rn_f64(double a, double b) { return __dmul_rn(a, b); }
inline int in_range(long long index, unsigned long long size, int check) {
  if ((unsigned long long)index < size) return 1;
  emulator::out_of_range(index, check);
}

// CUDA's mathematics, from C's library
extern "C" {
#define EMULATOR_1(name) double name(double) noexcept; float name##f(float) noexcept;
#define EMULATOR_2(name) double name(double, double) noexcept; float name##f(float, float) noexcept;
EMULATOR_1(exp) EMULATOR_1(exp2) EMULATOR_1(expm1) EMULATOR_1(log) EMULATOR_1(log2) EMULATOR_1(log10) EMULATOR_1(log1p)
EMULATOR_1(sqrt) EMULATOR_1(sin) EMULATOR_1(cos) EMULATOR_1(tan) EMULATOR_1(asin) EMULATOR_1(acos) EMULATOR_1(atan)
EMULATOR_1(sinh) EMULATOR_1(cosh) EMULATOR_1(tanh) EMULATOR_1(asinh) EMULATOR_1(acosh) EMULATOR_1(atanh) EMULATOR_1(erf)
EMULATOR_1(erfc) EMULATOR_1(floor) EMULATOR_1(ceil) EMULATOR_1(rint) EMULATOR_1(trunc) EMULATOR_1(fabs)
EMULATOR_2(fmax) EMULATOR_2(fmin) EMULATOR_2(pow) EMULATOR_2(fmod) EMULATOR_2(remainder) EMULATOR_2(atan2)
EMULATOR_2(hypot)
double fma(double, double, double) noexcept;
float fmaf(float, float, float) noexcept;
#undef EMULATOR_1
#undef EMULATOR_2
}
