// The arithmetic of wgmma: sums[64][n] += a[64][k] b[k][n], where k has 32 bytes of an operand.
//
// A descriptor says where an operand's 8 x 16 byte pieces lie (PTX ISA, "Strides" of "Asynchronous Warpgroup Level
// Matrix Shared Memory Layout"; the canonical layouts of CUTLASS, cute/atom/mma_traits_sm90_gmma.hpp).
#pragma once
#include "bulk.h"
#include "matrices.h"

namespace {

constexpr unsigned ROWS = 64, MOST_COLUMNS = 256, K_BYTES = 32;

// An operand's place: rows of `span` bytes, eight of which lie together; with 16 bytes nothing is swizzled.
struct Matrix {
  size_t start, leading, stride;
  size_t span;
  int swizzle;
  unsigned rank;  // of the block

  Matrix(unsigned long long descriptor, unsigned rank) : rank(rank) {
    constexpr int SPANS[] = {16, 128, 64, 32};
    start = (descriptor & 0x3fff) << 4;
    leading = (descriptor >> 16 & 0x3fff) << 4;
    stride = (descriptor >> 32 & 0x3fff) << 4;
    span = SPANS[descriptor >> 62];
    swizzle = span == 16 ? 0 : static_cast<int>(span);
  }
  // The 16 bytes of a row along k, of which there are two.
  const unsigned char *along_k(unsigned row, unsigned half) const {
    return at(row % 8 * span + row / 8 * stride + half * (swizzle ? 16 : leading));
  }
  // Eight neighbours of 16 bits along m or n, the first of which is number `first`, at one k.
  const unsigned char *across(unsigned first, unsigned k) const {
    if (!swizzle) return at(k % 8 * 16 + k / 8 * leading + first / 8 * stride);
    unsigned in_row = span / 2;
    return at(first % in_row * 2 + first / in_row * leading + k % 8 * span + k / 8 * stride);
  }
  const unsigned char *at(size_t offset) const { return shared_at(swizzled(start + offset, swizzle), rank); }
};

// All pieces of an operand, m or n of which has `extent`.
template <class Work> void pieces(const Matrix &matrix, unsigned extent, bool turned, Work work) {
  if (turned) {
    for (unsigned k = 0; k < K_BYTES / 2; k++)
      for (unsigned first = 0; first < extent; first += 8) work(matrix.across(first, k));
  } else {
    for (unsigned row = 0; row < extent; row++)
      for (unsigned half = 0; half < 2; half++) work(matrix.along_k(row, half));
  }
}

// The words of an operand that lies K-major, by rows.
void gather_rows(unsigned (*rows)[8], const Matrix &matrix, unsigned extent) {
  for (unsigned row = 0; row < extent; row++)
    for (unsigned half = 0; half < 2; half++) memcpy(rows[row] + 4 * half, matrix.along_k(row, half), 16);
}

// The same of one that lies MN-major: 16 bits at a time.
void gather_columns(unsigned (*rows)[8], const Matrix &matrix, unsigned extent) {
  for (unsigned k = 0; k < K_BYTES / 2; k++)
    for (unsigned first = 0; first < extent; first += 8) {
      unsigned short halves[8];
      memcpy(halves, matrix.across(first, k), sizeof halves);
      for (unsigned i = 0; i < 8; i++) reinterpret_cast<unsigned short *>(rows[first + i])[k] = halves[i];
    }
}

// A word that was poison stays NaN; any other that is no operand would be cut off in silence.
template <class T> bool operands(const unsigned (*rows)[8], unsigned count) {
  for (unsigned i = 0; i < 8 * count; i++)
    if (!is_operand<T>(rows[0][i]) && rows[0][i] != ~0u) return false;
  return true;
}

// sums += a x b, a's rows and b's columns by words.
template <class A, class B>
void multiply_words(void *sums, unsigned n, const unsigned (*a)[8], const unsigned (*b)[8]) {
  typedef typename A::Numbers Numbers;
  constexpr unsigned E = A::ELEMENTS, K = 8 * E, AT_ONCE = 8;  // rows whose sums do not wait for each other
  alignas(32) static decltype(Numbers{}[0] + 0) left[ROWS][K];
  static Numbers right[K][MOST_COLUMNS / 8];
  for (unsigned row = 0; row < ROWS; row++)
    for (unsigned i = 0; i < E; i++) {
      Numbers some = A::element(*reinterpret_cast<const Words *>(a[row]), i);
      for (unsigned w = 0; w < 8; w++) left[row][w * E + i] = some[w];
    }
  for (unsigned group = 0; group < n / 8; group++)
    for (unsigned w = 0; w < 8; w++) {
      Words words;
      for (unsigned j = 0; j < 8; j++) words[j] = b[8 * group + j][w];
      for (unsigned i = 0; i < E; i++) right[w * E + i][group] = B::element(words, i);
    }
  auto *d = static_cast<Numbers *>(sums);  // [ROWS][n / 8]
  for (unsigned row = 0; row < ROWS; row += AT_ONCE)
    for (unsigned group = 0; group < n / 8; group++) {
      Numbers some[AT_ONCE];
      for (unsigned r = 0; r < AT_ONCE; r++) some[r] = d[(row + r) * (n / 8) + group];
      for (unsigned k = 0; k < K; k++)
        for (unsigned r = 0; r < AT_ONCE; r++) some[r] += left[row + r][k] * right[k][group];
      for (unsigned r = 0; r < AT_ONCE; r++) d[(row + r) * (n / 8) + group] = some[r];
    }
}

}  // namespace
