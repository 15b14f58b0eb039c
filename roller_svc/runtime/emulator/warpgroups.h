// Warpgroups: wgmma, executed at wait_group, and setmaxnreg (PTX ISA, "wgmma", "setmaxnreg").
//
// Accumulators are poison from the issue until every product into them has been waited for.
#pragma once
#include "products.h"
#include "warps.h"

namespace {

constexpr unsigned MAX_WARPGROUPS = MAX_THREADS / WARPGROUP, MAX_ACCUMULATORS = 16, MAX_PRODUCTS = 1024;
constexpr unsigned FILE_REGISTERS = 65536;  // of an SM (CUDA programming guide, "Technical Specifications")

// Accumulators of 64 x n, one array in every thread.
struct Accumulators {
  unsigned char *registers[WARPGROUP];
  unsigned n, under_way;  // products
  unsigned settled_fences;        // fences until they last were the threads' own
  unsigned *values;       // [64][n], where any are under way
};

struct Product {
  Accumulators *sums;
  emulator::WarpgroupProduct what;
  unsigned long long a, b;
  bool in_registers, add;
  unsigned rows[ROWS][8], columns[MAX_COLUMNS][8];  // a and b as they were at the issue
  const unsigned *places[WARPGROUP];                 // of a's words in registers, four a thread
  unsigned group;
  int line;
};

struct Warpgroup : ConvergenceGroup {
  Fiber *waiting[WARPGROUP];
  Accumulators sums[MAX_ACCUMULATORS];
  unsigned accumulators_count;
  Product **products;  // that were issued and not awaited, oldest first; behind them some to use again
  unsigned product_count, product_capacity, group;
  unsigned fences, settled_fences;  // fences, and those until any registers last were the threads' own
  // arguments of each thread for the product at which they converge
  unsigned char *registers[WARPGROUP];
  const unsigned *words[WARPGROUP];
  unsigned long long a, b;
  int accumulate;
  unsigned register_count, wanted;  // of a thread
};

Warpgroup warpgroups[MAX_BLOCKS][MAX_WARPGROUPS];
unsigned free_registers[MAX_BLOCKS];
Waiters register_waiters[MAX_BLOCKS];

Warpgroup *warpgroup_of(Block &block, unsigned thread) { return &warpgroups[block.rank][thread / WARPGROUP]; }

void begin_warpgroups(unsigned rank) {
  unsigned each = FILE_REGISTERS / threads / 8 * 8;
  free_registers[rank] = 0;
  register_waiters[rank] = {};
  for (unsigned first = 0; first < threads; first += WARPGROUP) {
    Warpgroup &one = warpgroups[rank][first / WARPGROUP];
    one.members = threads - first < WARPGROUP ? threads - first : WARPGROUP;
    one.arrived = one.ended = one.accumulators_count = one.product_count = one.group = 0;
    one.fences = one.settled_fences = 0;
    one.register_count = one.wanted = each < 255 ? each : 255;
  }
}

Warpgroup &enter_warpgroup_collective(const char *what, int line) {
  Warpgroup &own = *current->warpgroup;
  if (own.members < WARPGROUP)
    report(FAULT, "line %d: %s takes a whole warpgroup, this one has %u threads", line, what, own.members);
  enter(own, own.waiting, "warpgroup", what, line);
  return own;
}
template <class Work> void rendezvous(Warpgroup &own, Work work) { rendezvous(own, own.waiting, work); }

// products ------------------------------------------------------------------------------------------------------------

// Lane 4 g + t of warp w has in register 4 j + 2 h + e row 16 w + g + 8 h, column 8 j + 2 t + e (PTX ISA, "Register
// Fragments" of wgmma, matrix D).
template <class Work> void fragments(const Accumulators &sums, Work work) {
  for (unsigned i = 0; i < WARPGROUP; i++) {
    unsigned row = i / 32 * 16 + i % 32 / 4, column = i % 4 * 2;
    for (unsigned j = 0; j < sums.n / 8; j++)
      for (unsigned h = 0; h < 2; h++)
        work(sums.registers[i] + 16 * j + 8 * h, sums.values + (row + 8 * h) * sums.n + 8 * j + column);
  }
}

void poison_accumulators(const Accumulators &sums) {
  for (unsigned char *registers : sums.registers) memset(registers, POISON, sums.n / 2 * 4);
}

Accumulators &accumulators_of(Warpgroup &own, const emulator::WarpgroupProduct &what, int line) {
  for (unsigned i = 0; i < own.accumulators_count; i++) {
    Accumulators &one = own.sums[i];
    if (!memcmp(one.registers, own.registers, sizeof one.registers) && one.n == what.n) return one;
    bool apart = own.registers[0] + 2 * what.n <= one.registers[0] || one.registers[0] + 2 * one.n <= own.registers[0];
    if (!apart && one.under_way)
      report(FAULT, "line %d: %s into registers that overlap those of another product", line, what.name);
  }
  unsigned i = 0;
  while (i < own.accumulators_count && own.sums[i].under_way) i++;  // reuse a slot without products under way
  if (i == MAX_ACCUMULATORS) failed("wgmma: that many accumulators");
  if (i == own.accumulators_count) own.accumulators_count++;
  Accumulators &one = own.sums[i];
  memcpy(one.registers, own.registers, sizeof one.registers);
  one.n = what.n;
  one.under_way = 0;
  one.settled_fences = own.settled_fences;
  if (!one.values) one.values = static_cast<unsigned *>(aligned_alloc(64, ROWS * MAX_COLUMNS * sizeof(unsigned)));
  if (!one.values) failed("aligned_alloc");
  return one;
}

// Lane 4 g + t of warp w has a's words as in mma: row 16 w + g, or 8 more in odd words, of columns t, or 4 more in the
// last two.
void gather_words(unsigned (*rows)[8], const unsigned *const *places) {
  for (unsigned i = 0; i < WARPGROUP; i++)
    for (unsigned r = 0; r < 4; r++)
      rows[i / 32 * 16 + i % 32 / 4 + 8 * (r & 1)][i % 4 + 4 * (r >> 1)] = places[i][r];
}

void gather(unsigned (*rows)[8], unsigned long long descriptor, unsigned extent, bool transposed) {
  Matrix matrix(descriptor, running);
  transposed ? gather_columns(rows, matrix, extent) : gather_rows(rows, matrix, extent);
}

void gather_operands(const Product &product, unsigned (*rows)[8], unsigned (*columns)[8]) {
  if (product.in_registers)
    gather_words(rows, product.places);
  else
    gather(rows, product.a, ROWS, product.what.a_transposed);
  gather(columns, product.b, product.what.n, product.what.b_transposed);
}

Product &new_product(Warpgroup &own) {
  if (own.product_count == own.product_capacity) {
    unsigned capacity = own.product_capacity ? 2 * own.product_capacity : 16;
    own.products = static_cast<Product **>(realloc(own.products, capacity * sizeof(Product *)));
    if (!own.products) failed("realloc");
    for (; own.product_capacity < capacity; own.product_capacity++) {
      own.products[own.product_capacity] = static_cast<Product *>(malloc(sizeof(Product)));
      if (!own.products[own.product_capacity]) failed("malloc");
    }
  }
  return *own.products[own.product_count++];
}

Number first_number() { return static_cast<Number>(current->number - current->thread % WARPGROUP); }

void check_matrix(unsigned long long descriptor, unsigned extent, bool transposed, const char *which, int line) {
  constexpr unsigned long long UNUSED = 0x3fffc000c000c000;  // the base offset of patterns too, which is 0 here
  if (descriptor & UNUSED) report(FAULT, "line %d: %s has a descriptor of distances too large", line, which);
  const Matrix matrix(descriptor, running);
  // a part of an operand may begin within rows, but not between those that lie together
  size_t atom = 8 * matrix.span, within = matrix.start % matrix.span;
  if (matrix.swizzle && matrix.start % atom != within)
    report(FAULT, "line %d: %s begins at shared byte %zu: the swizzle's rows begin at multiples of %zu", line, which,
           matrix.start, atom);
  if (matrix.swizzle && within + (transposed ? within ? 2 * extent : 0 : K_BYTES) > matrix.span)
    report(FAULT, "line %d: %s leaves its rows of %zu bytes", line, which, matrix.span);
  pieces(matrix, extent, transposed, [&](const unsigned char *at) {
    if (!in_shared(at, 16)) report(FAULT, "line %d: %s leaves the block's shared memory", line, which);
    if (race_detection) record_async_read(first_number(), at, 16, IS_LINE | static_cast<uint32_t>(line));
  });
}

void issue(Warpgroup &own, const emulator::WarpgroupProduct &what, bool in_registers, int line) {
  Product &product = new_product(own);
  product.what = what;
  product.a = own.a;
  product.b = own.b;
  product.in_registers = in_registers;
  product.add = own.accumulate;
  product.group = own.group;
  product.line = line;
  memcpy(product.places, own.words, sizeof product.places);
  if (!in_registers) check_matrix(own.a, ROWS, what.a_transposed, "a", line);
  check_matrix(own.b, what.n, what.b_transposed, "b", line);
  gather_operands(product, product.rows, product.columns);
  Accumulators &sums = accumulators_of(own, what, line);
  product.sums = &sums;
  if (!sums.under_way && own.fences == sums.settled_fences)
    report(FAULT, "line %d: %s without wgmma_fence since its registers were the threads' own", line, what.name);
  if (!sums.under_way++) {
    fragments(sums, [](const unsigned char *from, unsigned *to) { memcpy(to, from, 8); });
    poison_accumulators(sums);
  }
}

// Each warp reads its own rows of a. All warps read b; the first one is recorded.
void record_reads(const Matrix &matrix, unsigned extent, bool transposed, bool of_a, int line) {
  unsigned place = 0;
  pieces(matrix, extent, transposed, [&](const unsigned char *at) {
    unsigned row = transposed ? place % (extent / 8) * 8 : place / 2;
    place++;
    unsigned first = of_a ? row / 16 * 32 : 0;
    record_access(static_cast<Number>(first_number() + first), at, 16, READ, IS_LINE | static_cast<uint32_t>(line));
  });
}

// Operands must not change between issue and wait, because hardware reads them at any time in between.
void check_unchanged(const Product &product, const unsigned (*rows)[8], const unsigned (*columns)[8]) {
  const char *changed = nullptr;
  if (memcmp(columns, product.columns, product.what.n * sizeof *columns)) changed = "b";
  if (memcmp(rows, product.rows, sizeof product.rows)) changed = product.in_registers ? "registers of a" : "a";
  if (changed)
    report(FAULT, "line %d: %s of %s changed before the product was awaited", product.line, changed,
           product.what.name);
}

void run(Warpgroup &own, Product &product) {
  alignas(64) static unsigned rows[ROWS][8], columns[MAX_COLUMNS][8];
  Accumulators &sums = *product.sums;
  if (race_detection) {
    if (!product.in_registers)
      record_reads(Matrix(product.a, running), ROWS, product.what.a_transposed, true, product.line);
    record_reads(Matrix(product.b, running), sums.n, product.what.b_transposed, false, product.line);
  }
  gather_operands(product, rows, columns);
  check_unchanged(product, rows, columns);
  if (!product.add) memset(sums.values, 0, ROWS * sums.n * sizeof *sums.values);
  if (!multiply_words(product.what.types, sums.values, sums.n, rows, columns))
    report(FAULT, "line %d: %s of a word that was not rounded", product.line, product.what.name);
  if (--sums.under_way) return;
  fragments(sums, [](unsigned char *to, const unsigned *from) { memcpy(to, from, 8); });
  sums.settled_fences = own.settled_fences = own.fences;
}

// Products up to those of the last `pending` groups run.
void run_groups(Warpgroup &own, unsigned pending) {
  while (own.product_count && own.products[0]->group + pending < own.group) {
    Product *first = own.products[0];
    run(own, *first);
    memmove(own.products, own.products + 1, (own.product_capacity - 1) * sizeof first);
    own.products[own.product_capacity - 1] = first;
    own.product_count--;
  }
}

void end_products() {
  Warpgroup &own = *current->warpgroup;
  if (own.product_count) report(FAULT, "line %d: the thread ends without awaiting this product", own.products[0]->line);
  end_group(own, own.waiting, "warpgroup");
}

// registers -----------------------------------------------------------------------------------------------------------

void grant_registers(unsigned rank) {
  for (Warpgroup &one : warpgroups[rank]) {
    unsigned more = (one.wanted - one.register_count) * WARPGROUP;
    if (one.wanted <= one.register_count || more > free_registers[rank]) continue;
    free_registers[rank] -= more;
    one.register_count = one.wanted;
  }
  wake(register_waiters[rank]);
}

}  // namespace

void emulator::multiply(const WarpgroupProduct &product, void *d, const unsigned int *words, unsigned long long a,
                        unsigned long long b, int accumulate, int line) {
  Warpgroup &own = enter_warpgroup_collective(product.name, line);
  unsigned i = current->thread % WARPGROUP;
  own.registers[i] = static_cast<unsigned char *>(d);
  own.words[i] = words;
  if (own.arrived && (own.a != a || own.b != b || !own.accumulate != !accumulate))
    report(FAULT, "line %d: the threads of a warpgroup call %s with different operands", line, product.name);
  own.a = a;
  own.b = b;
  own.accumulate = accumulate;
  rendezvous(own, [&] { issue(own, product, words != nullptr, line); });
}

void emulator::fence_warpgroup(int line) {
  Warpgroup &own = enter_warpgroup_collective("wgmma_fence", line);
  rendezvous(own, [&] { own.fences++; });
}

void emulator::commit_warpgroup(int line) {
  Warpgroup &own = enter_warpgroup_collective("wgmma_commit", line);
  rendezvous(own, [&] { own.group++; });
}

void emulator::await_warpgroup(unsigned int pending, int line) {
  Warpgroup &own = enter_warpgroup_collective("wgmma_wait", line);
  rendezvous(own, [&] {
    run_groups(own, pending);
    for (unsigned first = 0; first < WARPGROUP; first += WARP)  // a warp's lanes wait as one
      order_warp(first_number() + first, WARP);
  });
}

void emulator::hold_results(const void *d, unsigned int count, int line) {
  const Warpgroup &own = *current->warpgroup;
  unsigned i = current->thread % WARPGROUP;
  for (unsigned s = 0; s < own.accumulators_count; s++)
    if (own.sums[s].under_way && own.sums[s].registers[i] == d)
      report(FAULT, "line %d: %u results of products that were not awaited", line, count);
}

void emulator::set_registers(unsigned int count, bool more, int line) {
  Warpgroup &own = enter_warpgroup_collective(more ? "registers_increase" : "registers_decrease", line);
  unsigned rank = running;
  rendezvous(own, [&] {
    if (more ? count < own.register_count : count > own.register_count)
      report(FAULT, "line %d: from %u registers to %u, which are not %s", line, own.register_count, count,
             more ? "more" : "fewer");
    own.wanted = count;
    if (!more) {
      free_registers[rank] += (own.register_count - count) * WARPGROUP;
      own.register_count = count;
    }
    grant_registers(rank);
  });
  while (own.register_count != own.wanted) yield_until(register_waiters[rank], line);
}
