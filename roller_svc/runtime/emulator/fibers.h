// Threads of a block as fibers: who runs next, and what they wait in together.
//
// A fiber runs until its thread waits. Threads wait in barriers, with their block, or in collectives, with their warp;
// whoever comes last lets the others go on. A seed shuffles the order in which threads start and go on; an odd one lets
// warps take turns at every collective, an even one lets a warp run on to the barrier.
#pragma once
#include "races.h"
#include "switch.h"

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr unsigned WARP = emulator::WARP;
static_assert(MOST_WARPS == MOST_THREADS / WARP, "warps of the largest block");
// Stacks begin at as many different cache sets, or those of a warp would displace each other.
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

// Asynchronous copies of a thread that have not landed, oldest first.
struct Copies {
  Copy *pending;
  unsigned count, room;
  unsigned group;  // the one that new copies belong to
};

struct Warp;

struct Fiber {
  void *sp;
  unsigned char *stack;  // null until the fiber is first needed
  unsigned thread, lane;
  Warp *warp;
  uint3 place;
  int line;  // of what it waits in
  Copies copies;
};

// What the lanes of a warp bring to one collective. Two take turns: a lane may still read the last one's results when
// another has come to the next.
struct alignas(64) Exchange {
  unsigned a[16][8], b[8][8];  // operands of mma in rows of 32 bytes: a's rows; b's k by columns
  unsigned d[16][8];           // an accumulator's rows, of either type
  const unsigned char *rows[WARP];
  emulator::Votes votes;
};

struct Warp {
  unsigned lanes, arrived, ended;
  const char *what;  // the collective in which `arrived` lanes wait
  int line;
  unsigned generation;
  Fiber *waiting[WARP];
  Exchange exchanges[2];
};

Fiber fibers[MOST_THREADS];
Fiber *idle[MOST_THREADS], *waiting[MOST_THREADS];
Fiber *ready[MOST_THREADS];  // a ring
Warp warps[MOST_WARPS];
unsigned idle_count, waiting_count, ready_count, ready_first;
unsigned order[MOST_THREADS];  // in which the threads of the block start
unsigned threads, started, finished;
Fiber *current;
void *outside;  // the stack that the blocks are started from
void *arguments[4096];
uint64_t random_state;
bool warps_take_turns;

unsigned random_below(unsigned limit) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>((random_state >> 33) % limit);
}

// Seed 0 leaves everything in order.
template <class T> void shuffle(T *items, unsigned count) {
  if (!random_state) return;
  for (unsigned i = count; i > 1; i--) {
    unsigned j = random_below(i);
    T kept = items[i - 1];
    items[i - 1] = items[j];
    items[j] = kept;
  }
}

void run_first(Fiber *fiber) {
  ready_first = (ready_first + MOST_THREADS - 1) % MOST_THREADS;
  ready[ready_first] = fiber;
  ready_count++;
}

void run_last(Fiber *fiber) { ready[(ready_first + ready_count++) % MOST_THREADS] = fiber; }

// Every thread that lives waits, and none of them for something that can still come.
[[noreturn]] void stuck() {
  for (const Warp &one : warps) {
    if (!one.arrived || &one >= warps + (threads + WARP - 1) / WARP) continue;
    report(FAULT, "warp divergence: %u of %u threads of warp %td wait in %s at line %d, the others in a barrier",
           one.arrived, one.lanes, &one - warps, one.what, one.line);
  }
  report(FAULT, "barrier divergence: %u of %u threads wait at line %d, the others have ended: a deadlock",
         waiting_count, threads, waiting[0]->line);
}

void complete_barrier() {
  int line = waiting[0]->line;
  for (unsigned i = 1; i < waiting_count; i++) {
    if (waiting[i]->line == line) continue;
    report(FAULT, "barrier divergence: thread %u waits at line %d, thread %u at line %d", waiting[0]->thread, line,
           waiting[i]->thread, waiting[i]->line);
  }
  if (waiting_count < threads) stuck();
  order_threads();
  shuffle(waiting, waiting_count);
  for (unsigned i = 0; i < waiting_count; i++) run_last(waiting[i]);
  waiting_count = 0;
}

void lead();

// A fiber that will begin another thread.
Fiber *starting() {
  Fiber *fiber = idle[--idle_count];
  if (!fiber->stack) {
    fiber->stack = mapped(STACK_BYTES + PAGE);  // the lowest page stays forbidden
    allow(fiber->stack + PAGE, STACK_BYTES, PROT_READ | PROT_WRITE);
    size_t colour = (fiber - fibers) % STACK_COLOURS * STACK_COLOUR_BYTES;
    fiber->sp = fresh(fiber->stack + PAGE + STACK_BYTES - colour, lead);
  }
  return fiber;
}

// Whoever runs next; null when the block is done. When no thread can run, the barrier is complete or never will be.
Fiber *next() {
  if (!ready_count && started < threads) return starting();
  if (!ready_count) {
    if (finished == threads) return nullptr;
    if (!waiting_count) stuck();
    complete_barrier();
  }
  Fiber *fiber = ready[ready_first];
  ready_first = (ready_first + 1) % MOST_THREADS;
  ready_count--;
  threadIdx = fiber->place;
  return fiber;
}

void leave_for(Fiber *to) {
  Fiber *self = current;
  if (to == self) return;
  current = to;
  emulator_switch(&self->sp, to ? to->sp : outside);
}

void leave() { leave_for(next()); }

void begin_thread(unsigned thread) {
  current->thread = thread;
  current->lane = thread % WARP;
  current->warp = &warps[thread / WARP];
  current->place = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
  threadIdx = current->place;
  current->copies.count = current->copies.group = 0;
}

void end_thread() {
  finished++;
  if (current->copies.count)
    report(FAULT, "line %d: the thread ends without awaiting this copy", current->copies.pending[0].line);
  Warp &own = *current->warp;
  own.ended++;
  if (own.arrived)
    report(FAULT, "warp divergence: the thread ends, but thread %u of its warp waits in %s at line %d",
           own.waiting[0]->thread, own.what, own.line);
}

// A fiber's life: it runs thread after thread, and waits idle while there is none.
void lead() {
  for (;;) {
    while (started < threads) {
      begin_thread(order[started++]);
      launch->run(arguments);
      end_thread();
    }
    idle[idle_count++] = current;
    leave();
  }
}

// The caller's collective: where its lanes' data goes. All lanes must come to the same one.
Exchange &entered(const char *what, int line) {
  Warp &own = *current->warp;
  if (!own.arrived) {
    own.what = what;
    own.line = line;
  } else if (own.what != what || own.line != line) {
    report(FAULT, "warp divergence: the thread is in %s at line %d, thread %u of its warp in %s at line %d", what, line,
           own.waiting[0]->thread, own.what, own.line);
  }
  if (own.ended)
    report(FAULT, "line %d: warp divergence: the thread is in %s, but %u of its warp's threads have ended", line, what,
           own.ended);
  current->line = line;
  return own.exchanges[own.generation % 2];
}

// Waits for the other lanes; whoever comes last does the work of all.
template <class Work> void meet(Work work) {
  Warp &own = *current->warp;
  if (own.arrived + 1 < own.lanes) {
    own.waiting[own.arrived++] = current;
    leave();
    return;
  }
  work(own.exchanges[own.generation % 2]);
  own.generation++;
  unsigned others = own.arrived;
  own.arrived = 0;
  shuffle(own.waiting, others);
  for (unsigned i = 0; i < others; i++)
    if (warps_take_turns)
      run_last(own.waiting[i]);
    else
      run_first(own.waiting[others - 1 - i]);
}

void begin_block() {
  order_block();
  threads = blockDim.x * blockDim.y * blockDim.z;
  started = finished = 0;
  for (unsigned i = 0; i < threads; i++) order[i] = i;
  shuffle(order, threads);
  for (unsigned first = 0; first < threads; first += WARP) {
    Warp &one = warps[first / WARP];
    one.lanes = threads - first < WARP ? threads - first : WARP;
    one.arrived = one.ended = 0;
  }
}

void run_threads() {
  begin_block();
  current = next();
  emulator_switch(&outside, current->sp);
}

}  // namespace

void emulator::barrier(int line) {
  current->line = line;
  waiting[waiting_count++] = current;
  leave();
}

void emulator::give_way() {
  static bool turn;
  if (!(turn = !turn)) return;
  run_last(current);
  leave_for(started < threads ? starting() : next());
}

unsigned int emulator::lane() { return current->lane; }

unsigned int emulator::lanes() { return current->warp->lanes; }

namespace {

void need_whole_mask(const char *what, unsigned mask, int width, int line) {
  if (mask != emulator::WHOLE_WARP || width != emulator::WARP)
    report(FAULT, "line %d: %s of mask %#x and width %d: the emulator knows whole warps only", line, what, mask, width);
}

}  // namespace

void emulator::sync_warp(unsigned int mask, int line) {
  need_whole_mask("__syncwarp", mask, WARP, line);
  entered("__syncwarp", line);
  meet([](Exchange &) { order_warp(current->thread / WARP); });
}

const emulator::Votes &emulator::exchanged(const char *what, unsigned int mask, int width, unsigned long long value,
                                           int line) {
  need_whole_mask(what, mask, width, line);
  Exchange &exchange = entered(what, line);
  if (!current->warp->arrived) memset(&exchange.votes, POISON, sizeof exchange.votes);
  exchange.votes.of[current->lane] = value;
  meet([](Exchange &) {});
  return exchange.votes;
}
