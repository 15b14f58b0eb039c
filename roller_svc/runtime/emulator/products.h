// The arithmetic of wgmma: sums[64][n] += a[64][k] b[k][n], where k has 32 bytes of an operand.
//
// A descriptor says where an operand's 8 x 16 byte pieces lie (PTX ISA, "Strides" of "Asynchronous Warpgroup Level
// Matrix Shared Memory Layout"; the canonical layouts of CUTLASS, cute/atom/mma_traits_sm90_gmma.hpp).
#pragma once
#include "bulk.h"
#include "matrices.h"

namespace {

constexpr unsigned ROWS = 64, MAX_COLUMNS = 256, K_BYTES = 32, MAX_K = K_BYTES;

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
template <class Work> void pieces(const Matrix &matrix, unsigned extent, bool transposed, Work work) {
  if (transposed) {
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

// Operands taken apart, as float32 or int32: a[row][k], and b[k] in groups of eight columns.
typedef Words Groups[MAX_K][MAX_COLUMNS / 8];
union Left {
  float floats[ROWS][MAX_K];
  unsigned words[ROWS][MAX_K];
};

// A word that was poison stays NaN; any other that is no operand would be cut off in silence.
template <class T> bool widen_rows(Left &left, const unsigned (*a)[8]) {
  constexpr unsigned E = T::ELEMENTS;
  bool fit = true;
  for (unsigned row = 0; row < ROWS; row++) {
    for (unsigned w = 0; w < 8; w++) fit = fit && (is_operand<T>(a[row][w]) || a[row][w] == ~0u);
    for (unsigned i = 0; i < E; i++) {
      auto some = reinterpret_cast<Words>(T::element(*reinterpret_cast<const Words *>(a[row]), i));
      for (unsigned w = 0; w < 8; w++) left.words[row][w * E + i] = some[w];
    }
  }
  return fit;
}
template <class T> bool widen_columns(Groups &right, const unsigned (*b)[8], unsigned n) {
  constexpr unsigned E = T::ELEMENTS;
  bool fit = true;
  for (unsigned group = 0; group < n / 8; group++)
    for (unsigned w = 0; w < 8; w++) {
      Words words;
      for (unsigned j = 0; j < 8; j++) words[j] = b[8 * group + j][w];
      for (unsigned j = 0; j < 8; j++) fit = fit && (is_operand<T>(words[j]) || words[j] == ~0u);
      for (unsigned i = 0; i < E; i++) right[w * E + i][group] = reinterpret_cast<Words>(T::element(words, i));
    }
  return fit;
}

// sums[ROWS][n] += left x right
template <class Numbers, class Scalar>
void multiply_widened(void *sums, unsigned n, unsigned k_count, const Scalar (*left)[MAX_K], const Groups &right) {
  constexpr unsigned AT_ONCE = 8;  // rows whose sums do not wait for each other
  auto *d = static_cast<Numbers *>(sums);
  for (unsigned row = 0; row < ROWS; row += AT_ONCE)
    for (unsigned group = 0; group < n / 8; group++) {
      Numbers some[AT_ONCE];
      for (unsigned r = 0; r < AT_ONCE; r++) some[r] = d[(row + r) * (n / 8) + group];
      for (unsigned k = 0; k < k_count; k++)
        for (unsigned r = 0; r < AT_ONCE; r++)
          some[r] += left[row + r][k] * reinterpret_cast<Numbers>(right[k][group]);
      for (unsigned r = 0; r < AT_ONCE; r++) d[(row + r) * (n / 8) + group] = some[r];
    }
}

// The same of float8, whose sums Hopper keeps short (MMA-Sim, arXiv:2511.10909: T-FDPA with F = 13): all products and
// the sum so far are aligned to the greatest of their powers of two, a product's being that of its factors' together,
// and lose what lies more than 13 bits behind it; the result has a fraction of 13 bits.
constexpr unsigned SHORT_BITS = 13, FRACTION_BITS = 23, BIAS = 127;
constexpr unsigned EXPONENT = 0xffu << FRACTION_BITS;
constexpr unsigned LEAST_EXPONENT = 27;  // with its bias, of what is aligned to: far below any product's

typedef int Integers __attribute__((vector_size(32)));

// The power of two of each number, 0 for 0; subnormal numbers of the type have that of its least normal one.
template <class T> Floats powers(Floats numbers) {
  Words bits = reinterpret_cast<Words>(numbers), least = Words{} + ((BIAS + T::LEAST_POWER) << FRACTION_BITS);
  Words exponent = bits & EXPONENT;
  exponent = where(reinterpret_cast<Words>(exponent < least), least, exponent);
  return reinterpret_cast<Floats>(exponent & reinterpret_cast<Words>((bits << 1) != 0));
}
struct Float8Powers {
  alignas(64) float left[ROWS][MAX_K];
  alignas(64) Groups right;
};
template <class A, class B>
void find_powers(Float8Powers &found, const Left &left, const Groups &right, unsigned n) {
  for (unsigned row = 0; row < ROWS; row++)
    for (unsigned k = 0; k < MAX_K; k += 8) {
      Floats some;
      memcpy(&some, &left.floats[row][k], sizeof some);
      some = powers<A>(some);
      memcpy(&found.left[row][k], &some, sizeof some);
    }
  for (unsigned k = 0; k < MAX_K; k++)
    for (unsigned group = 0; group < n / 8; group++)
      found.right[k][group] = reinterpret_cast<Words>(powers<B>(reinterpret_cast<Floats>(right[k][group])));
}

Words whole(Floats numbers) { return reinterpret_cast<Words>(__builtin_convertvector(numbers, Integers)); }

Floats short_sum(Floats sum, const float (&left)[MAX_K], const Groups &right, const float (&left_powers)[MAX_K],
                 const Groups &right_powers, unsigned group) {
  Floats most = reinterpret_cast<Floats>(reinterpret_cast<Words>(sum) & EXPONENT), plain = sum;
  for (unsigned k = 0; k < MAX_K; k++) {
    Floats power = left_powers[k] * reinterpret_cast<Floats>(right_powers[k][group]);
    most = power > most ? power : most;
    plain += left[k] * reinterpret_cast<Floats>(right[k][group]);
  }
  Words exponent = reinterpret_cast<Words>(most) >> FRACTION_BITS;
  exponent = where(reinterpret_cast<Words>(exponent < LEAST_EXPONENT), Words{} + LEAST_EXPONENT, exponent);
  Floats inverse = reinterpret_cast<Floats>((2 * BIAS + SHORT_BITS - exponent) << FRACTION_BITS);
  Floats quantum = reinterpret_cast<Floats>((exponent - SHORT_BITS) << FRACTION_BITS);
  Words total = whole(sum * inverse);
  for (unsigned k = 0; k < MAX_K; k++) total += whole(left[k] * reinterpret_cast<Floats>(right[k][group]) * inverse);
  Floats exact = __builtin_convertvector(reinterpret_cast<Integers>(total), Floats);
  Words result = reinterpret_cast<Words>(exact * quantum);
  result &= ~0u << (FRACTION_BITS - SHORT_BITS);
  // with an infinity or NaN among them the sum is what it would be anyway
  Words finite = reinterpret_cast<Words>((reinterpret_cast<Words>(plain) & EXPONENT) != EXPONENT);
  return reinterpret_cast<Floats>(where(finite, result, reinterpret_cast<Words>(plain)));
}

template <class A, class B> void multiply_float8(void *sums, unsigned n, const Left &left, const Groups &right) {
  static Float8Powers found;
  find_powers<A, B>(found, left, right, n);
  auto *d = static_cast<Floats *>(sums);
  for (unsigned row = 0; row < ROWS; row++)
    for (unsigned group = 0; group < n / 8; group++) {
      Floats &sum = d[row * (n / 8) + group];
      sum = short_sum(sum, left.floats[row], right, found.left[row], found.right, group);
    }
}

// What there is to know of a type of operands.
struct Type {
  unsigned elements;  // of a word
  bool (*rows)(Left &, const unsigned (*)[8]);
  bool (*columns)(Groups &, const unsigned (*)[8], unsigned);
};
template <class T> constexpr Type TYPE = {T::ELEMENTS, widen_rows<T>, widen_columns<T>};
constexpr const Type *TYPES[][2] = {  // in the order of emulator::Operands
    {&TYPE<F16>, &TYPE<F16>},   {&TYPE<Bf16>, &TYPE<Bf16>}, {&TYPE<Tf32>, &TYPE<Tf32>}, {&TYPE<E4m3>, &TYPE<E4m3>},
    {&TYPE<E4m3>, &TYPE<E5m2>}, {&TYPE<E5m2>, &TYPE<E4m3>}, {&TYPE<E5m2>, &TYPE<E5m2>}, {&TYPE<S8>, &TYPE<S8>},
    {&TYPE<S8>, &TYPE<U8>},     {&TYPE<U8>, &TYPE<S8>},     {&TYPE<U8>, &TYPE<U8>},
};

// sums[ROWS][n] += a x b, a's rows and b's columns by words; false for a word that is no operand.
bool multiply_words(emulator::Operands operands, void *sums, unsigned n, const unsigned (*a)[8],
                    const unsigned (*b)[8]) {
  alignas(64) static Left left;
  alignas(64) static Groups right;
  const Type &one = *TYPES[operands][0], &other = *TYPES[operands][1];
  if (!one.rows(left, a) || !other.columns(right, b, n)) return false;
  switch (operands) {
  case emulator::E4M3E4M3: multiply_float8<E4m3, E4m3>(sums, n, left, right); break;
  case emulator::E4M3E5M2: multiply_float8<E4m3, E5m2>(sums, n, left, right); break;
  case emulator::E5M2E4M3: multiply_float8<E5m2, E4m3>(sums, n, left, right); break;
  case emulator::E5M2E5M2: multiply_float8<E5m2, E5m2>(sums, n, left, right); break;
  default:
    if (operands < emulator::S8S8)
      multiply_widened<Floats>(sums, n, 8 * one.elements, left.floats, right);
    else
      multiply_widened<Words>(sums, n, 8 * one.elements, left.words, right);
  }
  return true;
}

}  // namespace
