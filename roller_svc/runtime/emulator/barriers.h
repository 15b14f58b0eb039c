// Barriers that not the whole block waits in: those with phases in shared memory (PTX ISA, "mbarrier"), and named ones.
//
// A phase is over when as many threads have arrived as the barrier is for, and all bytes that were expected are there.
// What a barrier is stands here; its word in shared memory only shows whether somebody wrote over it.
#pragma once
#include "warps.h"

namespace {

constexpr unsigned MOST_PHASED = 1024, MOST_NAMED = 16;
constexpr long MOST_ARRIVALS = (1 << 20) - 1;  // also of bytes
constexpr uint64_t WORD = 0x5ba1a2e35ba1a2e3;

// Where races are watched: what those knew who arrived in the phase that is over, and what those do who do in this one.
struct Known {
  Clock over, now;
  uint32_t time;  // when that phase was over
};

void leave_with(Known &known) {
  if (!races_watched) return;
  if (!known.now) known = {new_clock(), new_clock(), 0};
  release(current->number, known.now);
}
void leave_async_with(Known &known) {
  if (!races_watched) return;
  if (!known.now) known = {new_clock(), new_clock(), 0};
  release_async(known.now);
}
void end_phase(Known &known) {
  if (!known.now) return;
  memcpy(known.over, known.now, (all_threads() + 1) * sizeof *known.now);
  known.time = ++now;
}
void take_over(const Known &known) {
  if (known.over) acquire(current->number, known.over);
}
void forget_known(Known &known) {
  free(known.over);
  free(known.now);
  known = {};
}

struct Phased {
  unsigned block;
  size_t offset;  // of its word
  unsigned count, pending;
  long bytes;  // expected and not there, less than 0 where they came before they were expected
  unsigned phase;
  int line;          // of its init
  Number by;         // who did that,
  bool fenced, met;  // whether asynchronous copies know of it, and the block's other threads
  bool met_cluster;  // and those of other blocks
  Waiters waiters;
  Known known;
};

struct Named {
  unsigned count, arrived;
  int line, any, found;  // whether any of those who came says so; what those who met before said
  Waiters waiters;
  Known known;
};

Phased phased[MOST_PHASED];
unsigned phased_count;
Named named[MOST_BLOCKS][MOST_NAMED];
bool named_used;  // since the blocks began

void forget_named() {
  for (auto &of_block : named)
    for (Named &one : of_block) {
      forget_known(one.known);
      one = {};
    }
  named_used = false;
}

void begin_barriers() {
  for (unsigned i = 0; i < phased_count; i++) forget_known(phased[i].known);
  phased_count = 0;
  if (named_used) forget_named();
}

Phased *find(size_t offset, unsigned rank) {
  for (unsigned i = 0; i < phased_count; i++)
    if (phased[i].offset == offset && phased[i].block == rank) return &phased[i];
  return nullptr;
}

void check_word(const Phased &barrier, int line) {
  uint64_t word;
  memcpy(&word, shared_at(barrier.offset, barrier.block), sizeof word);
  if (word == WORD + barrier.offset) return;
  report(FAULT, "line %d: somebody wrote over the barrier at shared byte %zu, initialised at line %d", line,
         barrier.offset, barrier.line);
}

// The barrier at that offset of a block's shared memory, if the current thread may use it.
Phased &barrier_of(size_t offset, unsigned rank, int line) {
  Phased *found = find(offset, rank);
  if (!found) report(FAULT, "line %d: uses a barrier at shared byte %zu that was not initialised", line, offset);
  bool met = rank == current->block->rank ? found->met || found->by == current->number : found->met_cluster;
  if (!met)
    report(FAULT, "line %d: uses the barrier initialised at line %d, but nothing orders the two", line, found->line);
  check_word(*found, line);
  return *found;
}

size_t offset_of_barrier(const void *at, int line) {
  if (!in_shared(at, 8)) report(FAULT, "line %d: a barrier that is not in the block's shared memory", line);
  size_t offset = shared_offset(at, running);
  if (offset % 8) report(FAULT, "line %d: a barrier at shared byte %zu, no multiple of 8", line, offset);
  return offset;
}
Phased &own_barrier(const void *at, int line) { return barrier_of(offset_of_barrier(at, line), running, line); }

// All threads of a block have met, or all of a cluster: they know of each other's barriers.
void barriers_met(unsigned rank) {
  for (unsigned i = 0; i < phased_count; i++)
    if (phased[i].block == rank) phased[i].met = true;
}
void barriers_met_cluster() {
  for (unsigned i = 0; i < phased_count; i++) {
    phased[i].met = true;
    phased[i].met_cluster = phased[i].fenced;
  }
}

void complete_phase(Phased &barrier, int line) {
  if (barrier.pending) return;
  if (barrier.bytes < 0)
    report(FAULT, "line %d: %ld bytes more have come than the barrier initialised at line %d expects", line,
           -barrier.bytes, barrier.line);
  if (barrier.bytes) return;
  end_phase(barrier.known);
  barrier.phase++;
  barrier.pending = barrier.count;
  wake(barrier.waiters);
}

void arrive(Phased &barrier, long bytes, int line) {
  if (!barrier.pending)
    report(FAULT, "line %d: more than %u threads arrive at the barrier initialised at line %d: phase %u waits for "
           "%ld bytes", line, barrier.count, barrier.line, barrier.phase, barrier.bytes);
  barrier.bytes += bytes;
  if (bytes > MOST_ARRIVALS || barrier.bytes > MOST_ARRIVALS)
    report(FAULT, "line %d: a barrier cannot expect %ld bytes", line, bytes);
  barrier.pending--;
  leave_with(barrier.known);
  complete_phase(barrier, line);
}

// A copy's bytes are there.
void arrive_bytes(Phased &barrier, long bytes, int line) {
  barrier.bytes -= bytes;
  leave_async_with(barrier.known);
  complete_phase(barrier, line);
}

void end_barriers(const Block &block) {
  for (unsigned i = 0; i < phased_count; i++) {
    if (phased[i].block != block.rank) continue;
    check_word(phased[i], phased[i].line);
    if (phased[i].bytes)
      report(FAULT, "line %d: the block ends, and phase %u of this barrier lacks %ld bytes", phased[i].line,
             phased[i].phase, phased[i].bytes);
  }
}

}  // namespace

void emulator::barrier_init(void *at, unsigned int arrivals, int line) {
  size_t offset = offset_of_barrier(at, line);
  if (const Phased *found = find(offset, running))
    report(FAULT, "line %d: initialises the barrier of line %d again", line, found->line);
  if (!arrivals || arrivals > MOST_ARRIVALS) report(FAULT, "line %d: a barrier for %u threads", line, arrivals);
  if (phased_count == MOST_PHASED) failed("barriers: that many");
  Phased &own = phased[phased_count++];
  own = {};
  own.block = running;
  own.offset = offset;
  own.count = own.pending = arrivals;
  own.line = line;
  own.by = current->number;
  uint64_t word = WORD + offset;
  if (races_watched) watch(current->number, at, sizeof word, WRITE, IS_LINE | static_cast<uint32_t>(line));
  memcpy(at, &word, sizeof word);
}

void fence_barrier_init() {
  for (unsigned i = 0; i < phased_count; i++)
    if (phased[i].by == current->number) phased[i].fenced = true;
}

void emulator::barrier_arrive(void *at, unsigned int bytes, int line) { arrive(own_barrier(at, line), bytes, line); }

void emulator::barrier_wait(void *at, unsigned int parity, int line) {
  Phased &barrier = own_barrier(at, line);
  if (parity > 1) report(FAULT, "line %d: waits for a phase of parity %u", line, parity);
  while (barrier.phase % 2 == parity) wait_in(barrier.waiters, line);
  take_over(barrier.known);
}

void emulator::named_barrier(unsigned int id, unsigned int count, int line) {
  if (!id || id >= MOST_NAMED) report(FAULT, "line %d: a named barrier %u: they are from 1 to 15", line, id);
  if (!count || count % WARP || count > threads)
    report(FAULT, "line %d: a named barrier for %u threads: not some of the block's warps", line, count);
  meet_warp("named_barrier", line);
  named_used = true;
  Named &own = named[running][id];
  if (own.arrived && own.count != count)
    report(FAULT, "line %d: named barrier %u for %u threads, at line %d it was for %u", line, id, count, own.line,
           own.count);
  own.count = count;
  own.line = line;
  if (own.known.over && !covers(current->number, own.known.over, own.known.time))
    report(FAULT, "race: line %d: nothing orders the thread behind those who met in named barrier %u before: it could "
           "have come among them", line, id);
  leave_with(own.known);
  if (++own.arrived < count) {
    wait_in(own.waiters, line);
  } else {
    own.arrived = 0;
    own.found = own.any;
    own.any = 0;
    end_phase(own.known);
    wake(own.waiters);
    if (count == threads) barriers_met(running);
  }
  take_over(own.known);
}

int emulator::named_any(unsigned int id, unsigned int count, int cond, int line) {
  if (id < MOST_NAMED) named[running][id].any |= cond != 0;
  named_barrier(id, count, line);
  return named[running][id].found;
}
