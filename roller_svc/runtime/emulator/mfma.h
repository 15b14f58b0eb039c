// MFMA: what the 64 lanes of a wave bring together, and which part of it each gets.
//
// Lane l holds of A the quarter number l / 16 along k of row l % 16, of B that of column l % 16, and of the sums rows
// 4 (l / 16) to 4 (l / 16) + 3 of column l % 16 (AMD Instinct MI200 ISA, "Matrix Arithmetic Instructions"). Of float64,
// the sums are those of rows l / 16, l / 16 + 4, l / 16 + 8 and l / 16 + 12 (AMD lab notes, "Matrix cores").
#pragma once
#include "matrices.h"

namespace {

constexpr int SIDE = 16, QUARTERS = 4;

struct HalfBits {
  unsigned short bits;
  operator float() const { return f16_to_f32(bits); }
};
struct Bfloat16Bits {
  unsigned short bits;
  operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};
// Sums of bytes wrap.
struct SignedByte {
  signed char value;
  operator unsigned() const { return static_cast<unsigned>(static_cast<int>(value)); }
};

template <class Element, class Sum, int K> void multiply_waves(Exchange &exchange) {
  Sum b[K][SIDE];
  for (int column = 0; column < SIDE; column++)
    for (int k = 0; k < K; k++) b[k][column] = reinterpret_cast<const Element *>(exchange.wave_b[column])[k];
  for (int row = 0; row < SIDE; row++) {
    auto *sums = reinterpret_cast<Sum *>(exchange.wave_d[row]);
    for (int k = 0; k < K; k++) {
      Sum a = reinterpret_cast<const Element *>(exchange.wave_a[row])[k];
      for (int column = 0; column < SIDE; column++) sums[column] += a * b[k][column];
    }
  }
}

// The row of a lane's sum number `i`.
template <class Sum> unsigned row_of_sum(unsigned quarter, unsigned i) {
  return sizeof(Sum) == sizeof(double) ? quarter + QUARTERS * i : QUARTERS * quarter + i;
}

template <class Element, class Sum, int K>
void mfma(const char *what, void *d, const void *a, const void *b, int line) {
  constexpr size_t BYTES = K / QUARTERS * sizeof(Element);
  need_whole_warp(what, line);
  Exchange &exchange = enter_collective(what, line);
  unsigned side = current->lane % SIDE, quarter = current->lane / SIDE;
  memcpy(exchange.wave_a[side] + quarter * BYTES, a, BYTES);
  memcpy(exchange.wave_b[side] + quarter * BYTES, b, BYTES);
  auto *sums = static_cast<Sum *>(d);
  auto sum = [&](unsigned i) { return reinterpret_cast<Sum *>(exchange.wave_d[row_of_sum<Sum>(quarter, i)]) + side; };
  for (unsigned i = 0; i < 4; i++) memcpy(sum(i), sums + i, sizeof(Sum));
  rendezvous(multiply_waves<Element, Sum, K>);
  for (unsigned i = 0; i < 4; i++) memcpy(sums + i, sum(i), sizeof(Sum));
}

}  // namespace

#define EMULATOR_MFMA(name, type, sum, element, held, k) \
  void name(type *d, const held *a, const held *b, int line) { mfma<element, sum, k>(#name, d, a, b, line); }
EMULATOR_MFMA(mfma_16x16x16_f16, float, float, HalfBits, unsigned short, 16)
EMULATOR_MFMA(mfma_16x16x16_bf16, float, float, Bfloat16Bits, unsigned short, 16)
EMULATOR_MFMA(mfma_16x16x4_f32, float, float, float, float, 4)
EMULATOR_MFMA(mfma_16x16x16_s8, int, unsigned, SignedByte, signed char, 16)
EMULATOR_MFMA(mfma_16x16x32_s8, int, unsigned, SignedByte, signed char, 32)
EMULATOR_MFMA(mfma_16x16x4_f64, double, double, double, double, 4)
