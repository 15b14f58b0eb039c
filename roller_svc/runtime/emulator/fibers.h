// Cooperative scheduler: the threads of the blocks that run together are fibers.
//
// A fiber runs until its thread waits: in a barrier, or in a collective of its warp or warpgroup. The last arrival
// releases the others. The seed shuffles the order in which threads start and resume. With an odd seed warps interleave
// at every collective, with an even one a warp runs on to the barrier. Asynchronous work completes when no thread can
// run, or when it is waited for: as late as the memory model allows.
#pragma once
#include "races.h"
#include "switch.h"

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr unsigned WARP = emulator::WARP, WARPGROUP = 128;
constexpr unsigned MAX_FIBERS = MAX_BLOCKS * MAX_THREADS;
static_assert(MAX_FIBERS <= MAX_CONTEXTS, "fibers that can be saved");
// Stacks start in this many different cache sets, to avoid set conflicts between the threads of a warp.
constexpr unsigned STACK_COLOURS = 32;
constexpr size_t STACK_COLOUR_BYTES = 320;

struct Copy {
  unsigned char *to;
  const unsigned char *from;
  unsigned bytes;
  bool inside;
  unsigned group;
  int line;
};

// Pending asynchronous copies of a thread, oldest first.
struct Copies {
  Copy *pending;
  unsigned count, capacity;
  unsigned group;  // the one that new copies belong to
};

struct Block;
struct Warp;
struct Warpgroup;
struct Stores;

struct Fiber {
  void *sp;
  unsigned char *stack;  // null until the fiber is first needed
  unsigned thread, lane;  // in its block, in its warp
  Number number;          // in its cluster
  Block *block;
  Warp *warp;
  Warpgroup *warpgroup;
  uint3 position;
  int line;     // of what it waits in
  Fiber *next;  // of those that wait for the same
  Copies copies;
  Stores *stores;  // bulk stores that are not done, null for a thread that has made none
};

// Fibers that wait for the same event.
struct Waiters {
  Fiber *first;
};

// Threads that must converge: all reach the same collective.
struct ConvergenceGroup {
  unsigned members, arrived, ended;
  const char *what;  // the collective in which `arrived` threads wait
  int line;
  unsigned generation;
};

// Operands and results of a warp's collective. Double-buffered: a lane may still read the last results when another
// has reached the next collective.
struct alignas(64) Exchange {
  unsigned a[16][8], b[8][8];  // operands of mma in rows of 32 bytes: a's rows; b's k by columns
  unsigned d[16][8];           // an accumulator's rows, of either type
  double a64[16][8], b64[8][8], d64[16][8];  // the same of float64, b by columns
  unsigned char wave_a[16][32], wave_b[16][32];  // operands of MFMA: a's rows, b's columns
  unsigned char wave_d[16][16 * sizeof(double)];  // its sums
  const unsigned char *rows[WARP];
  emulator::Votes votes;
};

struct Warp : ConvergenceGroup {
  Fiber *waiting[WARP];
  Exchange exchanges[2];
};

struct Block {
  uint3 position;
  unsigned rank, finished, waiting_count;
  int any;                      // the OR of the threads in __syncthreads_or
  Fiber *waiting[MAX_THREADS];  // in __syncthreads
  Warp warps[MAX_WARPS];
};

Fiber fibers[MAX_FIBERS];
Fiber *idle[MAX_FIBERS];
Fiber *ready[MAX_FIBERS];  // a ring
Block blocks[MAX_BLOCKS];
unsigned idle_count, ready_count, ready_first;
unsigned order[MAX_FIBERS];  // in which the threads of the blocks start
unsigned started, finished;
Fiber *current;
void *outside;  // the stack that the blocks are started from
void *arguments[4096];
uint64_t random_state;
// A cooperative launch: the block whose threads run only while no others can, so that waits for it matter.
unsigned slow_rank = MAX_BLOCKS;
bool interleave_warps;

unsigned random_below(unsigned limit) {
  if (!random_state) return 0;
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>((random_state >> 33) % limit);
}

// Seed 0 leaves everything in order.
template <class T> void shuffle(T *items, unsigned count) {
  if (!random_state) return;
  for (unsigned i = count; i > 1; i--) {
    unsigned j = random_below(i);
    T item = items[i - 1];
    items[i - 1] = items[j];
    items[j] = item;
  }
}

void run_first(Fiber *fiber) {
  ready_first = (ready_first + MAX_FIBERS - 1) % MAX_FIBERS;
  ready[ready_first] = fiber;
  ready_count++;
}

void run_last(Fiber *fiber) { ready[(ready_first + ready_count++) % MAX_FIBERS] = fiber; }

// Defined in later headers. Complete one asynchronous copy (false if none is pending); report why no thread can run.
bool complete_async();
[[noreturn]] void report_deadlock();
// A thread ends; the last thread of a block ends.
void end_bulk();
void end_products();
void end_block(Block &block);
// All threads of a block have synchronised.
void publish_barriers(unsigned rank);

void fiber_main();

// Return a fiber that will start another thread.
Fiber *starting() {
  Fiber *fiber = idle[--idle_count];
  if (!fiber->stack) {
    fiber->stack = mapped(STACK_BYTES + PAGE);  // the lowest page stays forbidden
    allow(fiber->stack + PAGE, STACK_BYTES, PROT_READ | PROT_WRITE);
    size_t colour = (fiber - fibers) % STACK_COLOURS * STACK_COLOUR_BYTES;
    fiber->sp = new_stack(fiber->stack + PAGE + STACK_BYTES - colour, fiber_main);
  }
  return fiber;
}

void load_position(const Fiber *fiber) {
  threadIdx = fiber->position;
  blockIdx = fiber->block->position;
  running = fiber->block->rank;
}

// Bring a fiber to the front whose block is not the slow one. Returns whether there is one.
bool prefer_others() {
  for (unsigned i = 0; i < ready_count; i++) {
    Fiber *first = ready[ready_first];
    if (first->block->rank != slow_rank) return true;
    ready_first = (ready_first + 1) % MAX_FIBERS;
    ready_count--;
    run_last(first);
  }
  return false;
}

// Return the fiber that runs next; null when all threads have ended.
Fiber *next() {
  if (!prefer_others() && started < all_threads()) return starting();
  while (!ready_count) {
    if (finished == all_threads()) return nullptr;
    if (!complete_async()) report_deadlock();
  }
  Fiber *fiber = ready[ready_first];
  ready_first = (ready_first + 1) % MAX_FIBERS;
  ready_count--;
  load_position(fiber);
  return fiber;
}

void switch_to(Fiber *to) {
  Fiber *self = current;
  if (to == self) return;
  current = to;
  emulator_switch(&self->sp, to ? to->sp : outside);
}

void yield() { switch_to(next()); }

void yield_until(Waiters &waiters, int line) {
  current->line = line;
  current->next = waiters.first;
  waiters.first = current;
  yield();
}

void wake(Waiters &waiters) {
  static Fiber *woken[MAX_FIBERS];
  unsigned count = 0;
  for (Fiber *fiber = waiters.first; fiber; fiber = fiber->next) woken[count++] = fiber;
  waiters.first = nullptr;
  for (unsigned i = 0; i < count / 2; i++) {  // first come, first served
    Fiber *fiber = woken[i];
    woken[i] = woken[count - 1 - i];
    woken[count - 1 - i] = fiber;
  }
  shuffle(woken, count);
  for (unsigned i = 0; i < count; i++) run_last(woken[i]);
}

// Release the threads of a block that wait in __syncthreads.
void complete_barrier(Block &block) {
  int line = block.waiting[0]->line;
  for (unsigned i = 1; i < block.waiting_count; i++) {
    if (block.waiting[i]->line == line) continue;
    report(FAULT, "barrier divergence: thread %u waits at line %d, thread %u at line %d", block.waiting[0]->thread,
           line, block.waiting[i]->thread, block.waiting[i]->line);
  }
  order_block(block.rank);
  publish_barriers(block.rank);
  shuffle(block.waiting, block.waiting_count);
  for (unsigned i = 0; i < block.waiting_count; i++) run_last(block.waiting[i]);
  block.waiting_count = 0;
}

Warpgroup *warpgroup_of(Block &block, unsigned thread);

void begin_thread(unsigned number) {
  current->number = static_cast<Number>(number);
  current->thread = number % threads;
  current->lane = current->thread % WARP;
  current->block = &blocks[number / threads];
  current->warp = &current->block->warps[current->thread / WARP];
  current->warpgroup = warpgroup_of(*current->block, current->thread);
  unsigned thread = current->thread;
  current->position = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
  load_position(current);
  current->copies.count = current->copies.group = 0;
  waited[number] = false;
}

void end_group(ConvergenceGroup &own, Fiber *const *waiting, const char *kind_name) {
  own.ended++;
  if (own.arrived)
    report(FAULT, "warp divergence: the thread ends, but thread %u of its %s waits in %s at line %d",
           waiting[0]->thread, kind_name, own.what, own.line);
}

void end_thread() {
  if (launch->programmatic && !waited[current->number])
    report(FAULT, "the thread ends without grid_wait: launches before this one may not have ended");
  if (current->copies.count)
    report(FAULT, "line %d: the thread ends without awaiting this copy", current->copies.pending[0].line);
  end_bulk();
  end_group(*current->warp, current->warp->waiting, "warp");
  end_products();
  finished++;
  if (++current->block->finished == threads) end_block(*current->block);
}

// Entry function of a fiber: runs one thread after another, and is idle when there is none.
void fiber_main() {
  for (;;) {
    while (started < all_threads()) {
      begin_thread(order[started++]);
      launch->run(arguments);
      end_thread();
    }
    idle[idle_count++] = current;
    yield();
  }
}

void begin_block(Block &block) {
  block.finished = block.waiting_count = 0;
  block.any = 0;
  for (unsigned first = 0; first < threads; first += WARP) {
    Warp &one = block.warps[first / WARP];
    one.members = threads - first < WARP ? threads - first : WARP;
    one.arrived = one.ended = 0;
  }
}

void run_threads() {
  order_begin();
  started = finished = 0;
  for (unsigned i = 0; i < block_count; i++) begin_block(blocks[i]);
  for (unsigned i = 0; i < all_threads(); i++) order[i] = i;
  shuffle(order, all_threads());
  slow_rank = launch->cooperative && random_state ? random_below(block_count) : MAX_BLOCKS;
  current = next();
  emulator_switch(&outside, current->sp);
}

}  // namespace

void emulator::grid_wait() { waited[current->number] = true; }

void emulator::barrier(int line) {
  Block &own = *current->block;
  current->line = line;
  own.waiting[own.waiting_count++] = current;
  if (own.waiting_count == threads) complete_barrier(own);
  yield();
}

int emulator::any_thread(int cond, int line) {
  Block &own = *current->block;
  own.any |= cond != 0;
  barrier(line);
  const int result = own.any;
  barrier(line);  // all have seen it
  own.any = 0;
  barrier(line);
  return result;
}

void emulator::yield_every_second_call() {
  static bool yields;
  if (!(yields = !yields)) return;
  run_last(current);
  switch_to(started < all_threads() ? starting() : next());
}
