// ldmatrix and mma: what a warp's lanes bring together, and which part of it each gets.
//
// Of every shape, lane 4 g + t holds in word r of A the t-th word of four, of row g (or g + 8 in odd words), in the
// left half of the row (or the right one in words 2 and 3); in word r of B the t-th word of column g, in its upper half
// or the lower one; and in D columns 2 t and 2 t + 1 of row g, then of row g + 8 (PTX ISA, "Matrix Fragments for mma").
// Shapes differ in what a word holds: one tf32, two halves, four bytes.
#pragma once
#include "warps.h"

namespace {

typedef float Floats __attribute__((vector_size(32)));
typedef unsigned Words __attribute__((vector_size(32)));

Words where(Words mask, Words yes, Words no) { return (mask & yes) | (~mask & no); }

// Element number `i` of each of eight words, as float32 or as int32 that wraps.
struct F16 {
  static constexpr int ELEMENTS = 2;
  typedef Floats Numbers;
  static Floats widened(Words halves) {
    Words magnitude = (halves & 0x7fff) << 13, sign = (halves & 0x8000) << 16;
    Words finite = reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) * 0x1p112f);
    Words special = reinterpret_cast<Words>(magnitude >= 0x0f800000u);
    return reinterpret_cast<Floats>(where(special, magnitude | 0x7f800000, finite) | sign);
  }
  static Floats element(Words words, int i) { return widened(words >> 16 * i & 0xffff); }
};
struct Bf16 {
  static constexpr int ELEMENTS = 2;
  typedef Floats Numbers;
  static Floats element(Words words, int i) { return reinterpret_cast<Floats>(words >> 16 * i << 16); }
};
struct Tf32 {
  static constexpr int ELEMENTS = 1;
  typedef Floats Numbers;
  static Floats element(Words words, int) { return reinterpret_cast<Floats>(words & ~0x1fffu); }
};
struct E5m2 {
  static constexpr int ELEMENTS = 4, LEAST_POWER = -14;
  typedef Floats Numbers;
  static Floats element(Words words, int i) { return F16::widened((words >> 8 * i & 0xff) << 8); }
};
struct E4m3 {
  static constexpr int ELEMENTS = 4, LEAST_POWER = -6;
  typedef Floats Numbers;
  static Floats element(Words words, int i) {
    Words byte = words >> 8 * i & 0xff, magnitude = byte & 0x7f;
    Words finite = reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude << 20) * 0x1p120f);
    Words nan = reinterpret_cast<Words>(magnitude == 0x7fu);
    return reinterpret_cast<Floats>(where(nan, Words{} + 0x7fc00000, finite) | (byte & 0x80) << 24);
  }
};
struct U8 {
  static constexpr int ELEMENTS = 4;
  typedef Words Numbers;
  static Words element(Words words, int i) { return words >> 8 * i & 0xff; }
};
struct S8 {
  static constexpr int ELEMENTS = 4;
  typedef Words Numbers;
  static Words element(Words words, int i) { return ((words >> 8 * i & 0xff) ^ 0x80) - 0x80; }
};

// An operand's rows, taken apart: element number i of all words of a row lie together.
template <class T> void widen(typename T::Numbers (*numbers)[T::ELEMENTS], const unsigned (*rows)[8], int count) {
  for (int row = 0; row < count; row++)
    for (int i = 0; i < T::ELEMENTS; i++) numbers[row][i] = T::element(*reinterpret_cast<const Words *>(rows[row]), i);
}

// d += a x b of 8 columns, whose k has `CHUNKS` words of `E` elements; a's rows by words, b's words by columns.
template <class Numbers, int ROWS, int CHUNKS, int E>
void multiply(Numbers *d, const Numbers (*a)[E], const Numbers (*b)[E]) {
  constexpr int ROWS_AT_ONCE = 8;  // sums that do not wait for each other
  for (int first = 0; first < ROWS; first += ROWS_AT_ONCE) {
    Numbers sums[ROWS_AT_ONCE];
    for (int row = 0; row < ROWS_AT_ONCE; row++) sums[row] = d[first + row];
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      for (int i = 0; i < E; i++)
        for (int row = 0; row < ROWS_AT_ONCE; row++) sums[row] += a[first + row][i][chunk] * b[chunk][i];
    for (int row = 0; row < ROWS_AT_ONCE; row++) d[first + row] = sums[row];
  }
}

template <class A, class B, int ROWS, int CHUNKS> void multiply(Exchange &exchange) {
  typedef typename A::Numbers Numbers;
  Numbers a[ROWS][A::ELEMENTS], b[CHUNKS][B::ELEMENTS];
  widen<A>(a, exchange.a, ROWS);
  widen<B>(b, exchange.b, CHUNKS);
  multiply<Numbers, ROWS, CHUNKS, A::ELEMENTS>(reinterpret_cast<Numbers *>(exchange.d), a, b);
}

// What layout tf32 has is the device's own affair: only a conversion makes one (PTX ISA, "Alternate Floating-Point Data
// Formats"). The one that is emulated clears the bits that tf32 does not have.
template <class T> bool is_operand(unsigned) { return true; }
template <> bool is_operand<Tf32>(unsigned word) { return !(word & 0x1fff); }

template <class A, class B, int A_WORDS, int B_WORDS>
void mma(const char *what, void *d, const unsigned *a, const unsigned *b, int line) {
  constexpr int ROWS = A_WORDS == 1 ? 8 : 16;
  need_whole_warp(what, line);
  for (int r = 0; r < A_WORDS + B_WORDS; r++)
    if (r < A_WORDS ? !is_operand<A>(a[r]) : !is_operand<B>(b[r - A_WORDS]))
      report(FAULT, "line %d: %s of a word that was not rounded", line, what);
  Exchange &exchange = enter_collective(what, line);
  unsigned g = current->lane / 4, t = current->lane % 4;
#pragma GCC unroll 4
  for (int r = 0; r < A_WORDS; r++) exchange.a[g + 8 * (r & 1)][t + 4 * (r >> 1)] = a[r];
#pragma GCC unroll 2
  for (int r = 0; r < B_WORDS; r++) exchange.b[t + 4 * r][g] = b[r];
  auto *sums = static_cast<unsigned char *>(d);
  for (int r = 0; r < ROWS / 8; r++) memcpy(&exchange.d[g + 8 * r][2 * t], sums + 8 * r, 8);
  rendezvous(multiply<A, B, ROWS, 4 * B_WORDS>);
  for (int r = 0; r < ROWS / 8; r++) memcpy(sums + 8 * r, &exchange.d[g + 8 * r][2 * t], 8);
}

// Lane 4 g + t holds of float64 elements t, and t + 4, of row g, then g + 8, of A; the same of column g of B.
template <int ROWS, int K> void mma_f64(const char *what, double *d, const double *a, const double *b, int line) {
  constexpr int OCTETS = ROWS / 8, QUADS = K / 4;
  need_whole_warp(what, line);
  Exchange &exchange = enter_collective(what, line);
  unsigned g = current->lane / 4, t = current->lane % 4;
  for (int quad = 0; quad < QUADS; quad++) {
    for (int octet = 0; octet < OCTETS; octet++)
      exchange.a64[g + 8 * octet][t + 4 * quad] = a[OCTETS * quad + octet];
    exchange.b64[g][t + 4 * quad] = b[quad];
  }
  for (int i = 0; i < 2 * OCTETS; i++) exchange.d64[g + 8 * (i / 2)][2 * t + i % 2] = d[i];
  rendezvous([](Exchange &full) {
    for (int row = 0; row < ROWS; row++)
      for (int column = 0; column < 8; column++)
        for (int k = 0; k < K; k++)
          full.d64[row][column] = __builtin_fma(full.a64[row][k], full.b64[column][k], full.d64[row][column]);
  });
  for (int i = 0; i < 2 * OCTETS; i++) d[i] = exchange.d64[g + 8 * (i / 2)][2 * t + i % 2];
}

void check_row(const unsigned char *at, unsigned long available, const char *what, int line) {
  if (reinterpret_cast<uintptr_t>(at) % 16) report(FAULT, "line %d: a row of %s at no multiple of 16", line, what);
  if (available < 16) report(FAULT, "line %d: a row of %s leaves its shared array", line, what);
  if (!in_shared(at, 16)) report(FAULT, "line %d: a row of %s lies outside the block's shared memory", line, what);
}

}  // namespace

#define EMULATOR_MMA(name, type, a_type, b_type, a_words, b_words) \
  void name(type *d, const unsigned int *a, const unsigned int *b, int line) { \
    mma<a_type, b_type, a_words, b_words>(#name, d, a, b, line); \
  }
EMULATOR_MMA(mma_m16n8k16_f16, float, F16, F16, 4, 2)
EMULATOR_MMA(mma_m16n8k8_f16, float, F16, F16, 2, 1)
EMULATOR_MMA(mma_m16n8k16_bf16, float, Bf16, Bf16, 4, 2)
EMULATOR_MMA(mma_m16n8k8_bf16, float, Bf16, Bf16, 2, 1)
EMULATOR_MMA(mma_m16n8k8_tf32, float, Tf32, Tf32, 4, 2)
EMULATOR_MMA(mma_m16n8k32_s8s8, int, S8, S8, 4, 2)
EMULATOR_MMA(mma_m16n8k32_s8u8, int, S8, U8, 4, 2)
EMULATOR_MMA(mma_m16n8k32_u8s8, int, U8, S8, 4, 2)
EMULATOR_MMA(mma_m16n8k32_u8u8, int, U8, U8, 4, 2)
EMULATOR_MMA(mma_m8n8k16_s8s8, int, S8, S8, 1, 1)
EMULATOR_MMA(mma_m8n8k16_s8u8, int, S8, U8, 1, 1)
EMULATOR_MMA(mma_m8n8k16_u8s8, int, U8, S8, 1, 1)
EMULATOR_MMA(mma_m8n8k16_u8u8, int, U8, U8, 1, 1)
EMULATOR_MMA(mma_m16n8k32_e4m3e4m3, float, E4m3, E4m3, 4, 2)
EMULATOR_MMA(mma_m16n8k32_e4m3e5m2, float, E4m3, E5m2, 4, 2)
EMULATOR_MMA(mma_m16n8k32_e5m2e4m3, float, E5m2, E4m3, 4, 2)
EMULATOR_MMA(mma_m16n8k32_e5m2e5m2, float, E5m2, E5m2, 4, 2)

void mma_m16n8k8_f64(double *d, const double *a, const double *b, int line) {
  mma_f64<16, 8>("mma_m16n8k8_f64", d, a, b, line);
}
void mma_m8n8k4_f64(double *d, const double *a, const double *b, int line) {
  mma_f64<8, 4>("mma_m8n8k4_f64", d, a, b, line);
}

// Lane 8 i + j passes row j of matrix i: eight halves. Lane 4 g + t gets of each matrix halves 2 t and 2 t + 1 of
// row g; transposed, those of column g.
void emulator::load_matrix(unsigned int *words, const void *row, unsigned long available, int count, bool transposed,
                           int line) {
  const char *what = transposed ? "ldmatrix.trans" : "ldmatrix";
  need_whole_warp(what, line);
  Exchange &exchange = enter_collective(what, line);
  auto *at = static_cast<const unsigned char *>(row);
  unsigned lane = current->lane, g = lane / 4, t = lane % 4;
  if (static_cast<int>(lane) < 8 * count) check_row(at, available, what, line);
  exchange.rows[lane] = at;
  rendezvous([count, line](Exchange &full) {
    unsigned first = first_of_warp();
    for (int i = 0; i < 8 * count; i++) {
      Number thread = static_cast<Number>(first + i);
      if (race_detection) record_access(thread, full.rows[i], 16, READ, IS_LINE | static_cast<uint32_t>(line));
      memcpy(full.a[0] + 4 * i, full.rows[i], 16);
    }
  });
  auto *halves = reinterpret_cast<const unsigned short *>(exchange.a);
  for (int i = 0; i < count; i++, halves += 64)
    words[i] = transposed ? halves[16 * t + g] | static_cast<unsigned>(halves[16 * t + 8 + g]) << 16
                          : halves[8 * g + 2 * t] | static_cast<unsigned>(halves[8 * g + 2 * t + 1]) << 16;
}

// Lane 8 i + j passes where row j of matrix i goes; what lanes hold is as above.
void emulator::store_matrix(void *row, unsigned long available, const unsigned int *words, int count, bool transposed,
                            int line) {
  const char *what = transposed ? "stmatrix.trans" : "stmatrix";
  need_whole_warp(what, line);
  Exchange &exchange = enter_collective(what, line);
  auto *at = static_cast<const unsigned char *>(row);
  unsigned lane = current->lane, g = lane / 4, t = lane % 4;
  if (static_cast<int>(lane) < 8 * count) check_row(at, available, what, line);
  exchange.rows[lane] = at;
  auto *halves = reinterpret_cast<unsigned short *>(exchange.a);
  for (int i = 0; i < count; i++, halves += 64)
    for (unsigned e = 0; e < 2; e++)
      halves[transposed ? 8 * (2 * t + e) + g : 8 * g + 2 * t + e] = static_cast<unsigned short>(words[i] >> 16 * e);
  rendezvous([count, line](Exchange &full) {
    for (int i = 0; i < 8 * count; i++) {
      Number thread = static_cast<Number>(first_of_warp() + i);
      if (race_detection) record_access(thread, full.rows[i], 16, WRITE, IS_LINE | static_cast<uint32_t>(line));
      memcpy(const_cast<unsigned char *>(full.rows[i]), full.a[0] + 4 * i, 16);
    }
  });
}
