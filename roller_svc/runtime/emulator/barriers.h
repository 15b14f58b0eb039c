// Barriers of a part of a block: mbarriers in shared memory (PTX ISA, "mbarrier"), and named barriers.
//
// A phase completes when the expected number of threads has arrived and all expected bytes have been copied. The state
// of a barrier is kept here. Its word in shared memory only detects overwrites.
#pragma once
#include "warps.h"

namespace {

constexpr unsigned MAX_PHASED = 1024, MAX_NAMED = 16;
constexpr long MAX_ARRIVALS = (1 << 20) - 1;  // also of bytes
constexpr uint64_t WORD = 0x5ba1a2e35ba1a2e3;

// Race detection: the merged clocks of the arrivals of the last completed phase, and of the current one.
struct BarrierClocks {
  Clock over, now;
  uint32_t time;  // completion of the last phase
};

void release_to(BarrierClocks &known) {
  if (!race_detection) return;
  if (!known.now) known = {new_clock(), new_clock(), 0};
  release(current->number, known.now);
}
void release_async_to(BarrierClocks &known) {
  if (!race_detection) return;
  if (!known.now) known = {new_clock(), new_clock(), 0};
  release_async(known.now);
}
void end_phase(BarrierClocks &known) {
  if (!known.now) return;
  memcpy(known.over, known.now, (all_threads() + 1) * sizeof *known.now);
  known.time = ++now;
}
void acquire_barrier(const BarrierClocks &known) {
  if (known.over) acquire(current->number, known.over);
}
void free_clocks(BarrierClocks &known) {
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
  bool fenced, visible;     // initialisation visible to the async proxy, and to the block's other threads
  bool visible_in_cluster;  // and to threads of other blocks
  Waiters waiters;
  BarrierClocks known;
};

struct Named {
  unsigned count, arrived;
  int line, any, found;  // the OR of the current arrivals, and of the last completed phase
  Waiters waiters;
  BarrierClocks known;
};

Phased phased[MAX_PHASED];
unsigned phased_count;
Named named[MAX_BLOCKS][MAX_NAMED];
bool named_used;  // since the blocks began

void reset_named() {
  for (auto &of_block : named)
    for (Named &one : of_block) {
      free_clocks(one.known);
      one = {};
    }
  named_used = false;
}

void begin_barriers() {
  for (unsigned i = 0; i < phased_count; i++) free_clocks(phased[i].known);
  phased_count = 0;
  if (named_used) reset_named();
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
  report(FAULT, "line %d: the barrier at shared byte %zu, initialised at line %d, was overwritten", line,
         barrier.offset, barrier.line);
}

// Return the barrier at that offset of a block's shared memory. Reports a fault if its initialisation is not visible.
Phased &barrier_of(size_t offset, unsigned rank, int line) {
  Phased *found = find(offset, rank);
  if (!found) report(FAULT, "line %d: uses a barrier at shared byte %zu that was not initialised", line, offset);
  bool met = rank == current->block->rank ? found->visible || found->by == current->number : found->visible_in_cluster;
  if (!met)
    report(FAULT, "line %d: uses the barrier initialised at line %d, but nothing orders the two", line, found->line);
  check_word(*found, line);
  return *found;
}

size_t offset_of_barrier(const void *at, int line) {
  if (!in_shared(at, 8)) report(FAULT, "line %d: a barrier that is not in the block's shared memory", line);
  size_t offset = shared_offset(at, running);
  if (offset % 8) report(FAULT, "line %d: a barrier at shared byte %zu, which is not a multiple of 8", line, offset);
  return offset;
}
Phased &own_barrier(const void *at, int line) { return barrier_of(offset_of_barrier(at, line), running, line); }

// All threads of a block, or of a cluster, have synchronised: initialisations become visible to them.
void publish_barriers(unsigned rank) {
  for (unsigned i = 0; i < phased_count; i++)
    if (phased[i].block == rank) phased[i].visible = true;
}
void publish_cluster_barriers() {
  for (unsigned i = 0; i < phased_count; i++) {
    phased[i].visible = true;
    phased[i].visible_in_cluster = phased[i].fenced;
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
  if (bytes > MAX_ARRIVALS || barrier.bytes > MAX_ARRIVALS)
    report(FAULT, "line %d: a barrier cannot expect %ld bytes", line, bytes);
  barrier.pending--;
  release_to(barrier.known);
  complete_phase(barrier, line);
}

// The bytes of a copy have arrived.
void arrive_bytes(Phased &barrier, long bytes, int line) {
  barrier.bytes -= bytes;
  release_async_to(barrier.known);
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
  if (!arrivals || arrivals > MAX_ARRIVALS) report(FAULT, "line %d: a barrier for %u threads", line, arrivals);
  if (phased_count == MAX_PHASED) failed("barriers: that many");
  Phased &own = phased[phased_count++];
  own = {};
  own.block = running;
  own.offset = offset;
  own.count = own.pending = arrivals;
  own.line = line;
  own.by = current->number;
  uint64_t word = WORD + offset;
  if (race_detection) record_access(current->number, at, sizeof word, WRITE, IS_LINE | static_cast<uint32_t>(line));
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
  while (barrier.phase % 2 == parity) yield_until(barrier.waiters, line);
  acquire_barrier(barrier.known);
}

void emulator::named_barrier(unsigned int id, unsigned int count, int line) {
  if (!id || id >= MAX_NAMED) report(FAULT, "line %d: a named barrier %u: they are from 1 to 15", line, id);
  if (!count || count % WARP || count > threads)
    report(FAULT, "line %d: a named barrier for %u threads: which is not a number of the block's warps", line, count);
  rendezvous_warp("named_barrier", line);
  named_used = true;
  Named &own = named[running][id];
  if (own.arrived && own.count != count)
    report(FAULT, "line %d: named barrier %u for %u threads, at line %d it was for %u", line, id, count, own.line,
           own.count);
  own.count = count;
  own.line = line;
  if (own.known.over && !covers(current->number, own.known.over, own.known.time))
    report(FAULT, "race: line %d: nothing orders the thread after the last completed phase of named barrier %u: it "
           "could have arrived in that phase", line, id);
  release_to(own.known);
  if (++own.arrived < count) {
    yield_until(own.waiters, line);
  } else {
    own.arrived = 0;
    own.found = own.any;
    own.any = 0;
    end_phase(own.known);
    wake(own.waiters);
    if (count == threads) publish_barriers(running);
  }
  acquire_barrier(own.known);
}

int emulator::named_any(unsigned int id, unsigned int count, int cond, int line) {
  if (id < MAX_NAMED) named[running][id].any |= cond != 0;
  named_barrier(id, count, line);
  return named[running][id].found;
}
