// Host implementations of the wrappers of codegen/cuda/hopper_instructions.py. The semantics are in barriers.h, bulk.h,
// warpgroups.h and clusters.h; `line` is the caller's.
#pragma once

#define EMULATOR_LINE int line = __builtin_LINE()
#define EMULATOR_AVAILABLE(at) __builtin_dynamic_object_size(at, 0)

namespace emulator {

struct BulkLoad {
  const TensorMap *map;
  int rank;
  bool im2col, multicast;
  const int *at;                  // coordinates
  const unsigned short *offsets;  // im2col
  unsigned short mask;
};

void barrier_init(void *at, unsigned int arrivals, int line);
void barrier_arrive(void *at, unsigned int bytes, int line);
void barrier_arrive_remote(void *at, unsigned int rank, int line);
void barrier_wait(void *at, unsigned int parity, int line);
void named_barrier(unsigned int id, unsigned int threads, int line);
int named_any(unsigned int id, unsigned int threads, int cond, int line);
void arrive_after_copies(void *barrier, int line);
void copy_bulk(void *shared, unsigned long available, const void *memory, unsigned int bytes, void *barrier, int line);

void load(void *shared, unsigned long available, void *barrier, const BulkLoad &load, int line);
void store(const TensorMap *map, const void *shared, unsigned long available, int rank, const int *at, int line);
void await_stores(unsigned int pending, bool read);
void store_matrix(void *row, unsigned long available, const unsigned int *words, int count, bool transposed,
                  int line);

// Types of a product's operands.
enum Operands { F16F16, BF16BF16, TF32TF32, E4M3E4M3, E4M3E5M2, E5M2E4M3, E5M2E5M2, S8S8, S8U8, U8S8, U8U8 };
struct WarpgroupProduct {
  const char *name;
  Operands types;
  unsigned int n;
  bool a_transposed, b_transposed;  // MN-major
};
// `words`: a's in registers, or null where `a` describes it.
void multiply(const WarpgroupProduct &product, void *d, const unsigned int *words, unsigned long long a,
              unsigned long long b, int accumulate, int line);
void fence_warpgroup(int line);
void commit_warpgroup(int line);
void await_warpgroup(unsigned int pending, int line);
void hold_results(const void *d, unsigned int count, int line);
void set_registers(unsigned int count, bool more, int line);

void cluster_sync(int line);
void *map_shared_rank(void *shared, unsigned int rank, int line);
// The calling thread's own instance of a shared variable, which the compiler places in the first block's.
void *own_shared(void *first);
template <class T> inline T &own(T &first) { return *(T *)own_shared((void *)&first); }

}  // namespace emulator

unsigned int shared_address(const void *shared);

// barriers ------------------------------------------------------------------------------------------------------------
inline void barrier_init(unsigned long long *barrier, unsigned int arrivals, EMULATOR_LINE) {
  emulator::barrier_init(barrier, arrivals, line);
}
void fence_barrier_init();
inline void barrier_arrive(unsigned long long *barrier, EMULATOR_LINE) { emulator::barrier_arrive(barrier, 0, line); }
inline void barrier_arrive_remote(unsigned long long *barrier, unsigned int rank, EMULATOR_LINE) {
  emulator::barrier_arrive_remote(barrier, rank, line);
}
inline void barrier_expect(unsigned long long *barrier, unsigned int bytes, EMULATOR_LINE) {
  emulator::barrier_arrive(barrier, bytes, line);
}
inline void barrier_wait(unsigned long long *barrier, unsigned int parity, EMULATOR_LINE) {
  emulator::barrier_wait(barrier, parity, line);
}
inline void barrier_test_wait(unsigned long long *barrier, unsigned int parity, EMULATOR_LINE) {
  emulator::barrier_wait(barrier, parity, line);
}
inline void arrive_after_copies(unsigned long long *barrier, EMULATOR_LINE) {
  emulator::arrive_after_copies(barrier, line);
}
__forceinline__ void copy_bulk(void *shared, const void *memory, unsigned int bytes, unsigned long long *barrier,
                               EMULATOR_LINE) {
  emulator::copy_bulk(shared, EMULATOR_AVAILABLE(shared), memory, bytes, barrier, line);
}
inline void named_barrier(unsigned int id, unsigned int threads, EMULATOR_LINE) {
  emulator::named_barrier(id, threads, line);
}
inline int named_any(unsigned int id, unsigned int threads, int cond, EMULATOR_LINE) {
  return emulator::named_any(id, threads, cond, line);
}

// bulk copies ---------------------------------------------------------------------------------------------------------
#define EMULATOR_VALUES(...) {__VA_ARGS__}
#define EMULATOR_LOAD(name, rank, im2col, parameters, places, skips) \
  __forceinline__ void name(void *shared, const TensorMap *map, unsigned long long *barrier, parameters, \
                            EMULATOR_LINE) { \
    const int at[] = EMULATOR_VALUES places; \
    const unsigned short offsets[] = EMULATOR_VALUES skips; \
    emulator::load(shared, EMULATOR_AVAILABLE(shared), barrier, {map, rank, im2col, false, at, offsets, 0}, line); \
  } \
  __forceinline__ void name##_multicast(void *shared, const TensorMap *map, unsigned long long *barrier, parameters, \
                                        unsigned short mask, EMULATOR_LINE) { \
    const int at[] = EMULATOR_VALUES places; \
    const unsigned short offsets[] = EMULATOR_VALUES skips; \
    emulator::load(shared, EMULATOR_AVAILABLE(shared), barrier, {map, rank, im2col, true, at, offsets, mask}, line); \
  }
#define EMULATOR_1 int c0
#define EMULATOR_2 EMULATOR_1, int c1
#define EMULATOR_3 EMULATOR_2, int c2
#define EMULATOR_4 EMULATOR_3, int c3
#define EMULATOR_5 EMULATOR_4, int c4
#define EMULATOR_IM2COL_3 EMULATOR_3, unsigned short w
#define EMULATOR_IM2COL_4 EMULATOR_4, unsigned short w, unsigned short h
#define EMULATOR_IM2COL_5 EMULATOR_5, unsigned short w, unsigned short h, unsigned short d
EMULATOR_LOAD(tma_load_1d, 1, false, EMULATOR_1, (c0), (0))
EMULATOR_LOAD(tma_load_2d, 2, false, EMULATOR_2, (c0, c1), (0))
EMULATOR_LOAD(tma_load_3d, 3, false, EMULATOR_3, (c0, c1, c2), (0))
EMULATOR_LOAD(tma_load_4d, 4, false, EMULATOR_4, (c0, c1, c2, c3), (0))
EMULATOR_LOAD(tma_load_5d, 5, false, EMULATOR_5, (c0, c1, c2, c3, c4), (0))
EMULATOR_LOAD(tma_load_im2col_3d, 3, true, EMULATOR_IM2COL_3, (c0, c1, c2), (w))
EMULATOR_LOAD(tma_load_im2col_4d, 4, true, EMULATOR_IM2COL_4, (c0, c1, c2, c3), (w, h))
EMULATOR_LOAD(tma_load_im2col_5d, 5, true, EMULATOR_IM2COL_5, (c0, c1, c2, c3, c4), (w, h, d))
#undef EMULATOR_LOAD

#define EMULATOR_STORE(name, rank, parameters, places) \
  __forceinline__ void name(const TensorMap *map, const void *shared, parameters, EMULATOR_LINE) { \
    const int at[] = EMULATOR_VALUES places; \
    emulator::store(map, shared, EMULATOR_AVAILABLE(shared), rank, at, line); \
  }
EMULATOR_STORE(tma_store_1d, 1, EMULATOR_1, (c0))
EMULATOR_STORE(tma_store_2d, 2, EMULATOR_2, (c0, c1))
EMULATOR_STORE(tma_store_3d, 3, EMULATOR_3, (c0, c1, c2))
EMULATOR_STORE(tma_store_4d, 4, EMULATOR_4, (c0, c1, c2, c3))
EMULATOR_STORE(tma_store_5d, 5, EMULATOR_5, (c0, c1, c2, c3, c4))
#undef EMULATOR_STORE
#undef EMULATOR_VALUES
#undef EMULATOR_1
#undef EMULATOR_2
#undef EMULATOR_3
#undef EMULATOR_4
#undef EMULATOR_5
#undef EMULATOR_IM2COL_3
#undef EMULATOR_IM2COL_4
#undef EMULATOR_IM2COL_5
void bulk_commit();
template <int PENDING> inline void bulk_wait() { emulator::await_stores(PENDING, false); }
template <int PENDING> inline void bulk_wait_read() { emulator::await_stores(PENDING, true); }
inline void prefetch_map(const TensorMap *) {}
void fence_async();
inline void grid_launch_dependents() {}
inline void grid_wait() { emulator::grid_wait(); }

// stmatrix ------------------------------------------------------------------------------------------------------------
#define EMULATOR_STORE_MATRIX(name, count, transposed) \
  __forceinline__ void name(void *row, const unsigned int *words, EMULATOR_LINE) { \
    emulator::store_matrix(row, EMULATOR_AVAILABLE(row), words, count, transposed, line); \
  }
EMULATOR_STORE_MATRIX(store_matrix_1, 1, false)
EMULATOR_STORE_MATRIX(store_matrix_2, 2, false)
EMULATOR_STORE_MATRIX(store_matrix_4, 4, false)
EMULATOR_STORE_MATRIX(store_matrix_1_transposed, 1, true)
EMULATOR_STORE_MATRIX(store_matrix_2_transposed, 2, true)
EMULATOR_STORE_MATRIX(store_matrix_4_transposed, 4, true)
#undef EMULATOR_STORE_MATRIX

// wgmma: the driver writes one of these in place of each wrapper that a kernel has ------------------------------------
#define EMULATOR_WGMMA(name, type, types, n, a_transposed, b_transposed) \
  inline void name(type *d, unsigned long long a, unsigned long long b, int accumulate, \
                   int line = __builtin_LINE()) { \
    emulator::multiply({#name, emulator::types, n, a_transposed, b_transposed}, d, nullptr, a, b, accumulate, line); \
  }
#define EMULATOR_WGMMA_REGISTERS(name, type, types, n, a_transposed, b_transposed) \
  inline void name(type *d, const unsigned int *a, unsigned long long b, int accumulate, \
                   int line = __builtin_LINE()) { \
    emulator::multiply({#name, emulator::types, n, a_transposed, b_transposed}, d, a, 0, b, accumulate, line); \
  }
#define EMULATOR_HOLD(name, type, count) \
  inline void name(type *d, int line = __builtin_LINE()) { emulator::hold_results(d, count, line); }
inline void wgmma_fence(EMULATOR_LINE) { emulator::fence_warpgroup(line); }
inline void wgmma_commit(EMULATOR_LINE) { emulator::commit_warpgroup(line); }
template <int PENDING> inline void wgmma_wait(EMULATOR_LINE) { emulator::await_warpgroup(PENDING, line); }
template <int COUNT> inline void registers_decrease(EMULATOR_LINE) {
  static_assert(COUNT >= 24 && COUNT <= 256 && COUNT % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
  emulator::set_registers(COUNT, false, line);
}
template <int COUNT> inline void registers_increase(EMULATOR_LINE) {
  static_assert(COUNT >= 24 && COUNT <= 256 && COUNT % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
  emulator::set_registers(COUNT, true, line);
}

// clusters ------------------------------------------------------------------------------------------------------------
inline void cluster_sync(EMULATOR_LINE) { emulator::cluster_sync(line); }
unsigned int cluster_rank();
template <class T> inline T *map_shared_rank(T *shared, unsigned int rank, EMULATOR_LINE) {
  return (T *)emulator::map_shared_rank((void *)shared, rank, line);
}

#undef EMULATOR_AVAILABLE
#undef EMULATOR_LINE
