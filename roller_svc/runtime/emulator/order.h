// Order: what of the past a thread knows to have happened.
//
// Barriers of all threads, of a cluster, a block or a warp, are counted by times: what was before one is known to all
// behind it. Barriers with phases, and named ones, bring together whoever comes: where they are used, every thread has
// a clock too, of times up to which it knows what each other thread did (a vector clock).
#pragma once
#include "memory.h"

#include <stdlib.h>

namespace {

constexpr unsigned MOST_THREADS = 1024;  // of a block
constexpr unsigned MOST_WARPS = MOST_THREADS / emulator::WARP;

// Threads are numbered through the blocks of a cluster. Copies that no thread makes have a number for all of them.
typedef uint16_t Number;
constexpr Number ASYNC = 0xffff;

bool races_watched;  // the program was built for it
// Times of the last event of each kind.
uint32_t now, launch_began, cluster_began, cluster_met, block_met[MOST_BLOCKS], warp_met[MOST_BLOCKS * MOST_WARPS];
// When each thread last made its writes visible to asynchronous copies, and when others last came to know of that.
uint32_t fenced[MOST_BLOCKS * MOST_THREADS], fence_known[MOST_BLOCKS * MOST_THREADS];

typedef uint32_t *Clock;  // an entry a thread, one for ASYNC
uint32_t *clocks;         // all threads'; null until a barrier needs them
size_t clock_bytes;

unsigned all_threads() { return block_count * threads; }
unsigned block_of(Number number) { return number == ASYNC ? MOST_BLOCKS : number / threads; }
unsigned warp_of(Number number) {
  return number == ASYNC ? MOST_BLOCKS * MOST_WARPS : block_of(number) * MOST_WARPS + number % threads / emulator::WARP;
}
unsigned entry_of(Number number) { return number == ASYNC ? all_threads() : number; }
Clock clock_of(Number number) { return clocks + size_t(number) * (all_threads() + 1); }

void raise(uint32_t &time, uint32_t least) {
  if (time < least) time = least;
}
void join(Clock to, const uint32_t *from) {
  for (unsigned i = 0; i <= all_threads(); i++) raise(to[i], from[i]);
}

Clock new_clock() {
  auto *clock = static_cast<Clock>(calloc(all_threads() + 1, sizeof(uint32_t)));
  if (!clock) failed("calloc");
  return clock;
}

void drop_clocks() {
  if (clocks) munmap(clocks, clock_bytes);
  clocks = nullptr;
}

void need_clocks() {
  if (clocks) return;
  clock_bytes = rounded(size_t(all_threads()) * (all_threads() + 1) * sizeof(uint32_t), PAGE);
  clocks = reinterpret_cast<uint32_t *>(mapped(clock_bytes));
  allow(reinterpret_cast<unsigned char *>(clocks), clock_bytes, PROT_READ | PROT_WRITE);
}

void order_launch() { launch_began = ++now; }

void order_begin() {  // of blocks that run together
  cluster_began = cluster_met = ++now;
  memset(block_met, 0, sizeof block_met);
  memset(warp_met, 0, sizeof warp_met);
  drop_clocks();
}

// Threads first .. first + count - 1 have met.
void share(unsigned first, unsigned count) {
  if (!races_watched) return;
  memcpy(fence_known + first, fenced + first, count * sizeof *fenced);
  if (!clocks) return;
  Clock all = clock_of(static_cast<Number>(first));
  for (unsigned i = 1; i < count; i++) join(all, clock_of(static_cast<Number>(first + i)));
  for (unsigned i = 1; i < count; i++)
    memcpy(clock_of(static_cast<Number>(first + i)), all, (all_threads() + 1) * sizeof *all);
}
void order_cluster() {
  cluster_met = ++now;
  if (races_watched) memcpy(fence_known, fenced, all_threads() * sizeof *fenced);
}
void order_block(unsigned rank) {
  block_met[rank] = ++now;
  share(rank * threads, threads);
}
void order_warp(unsigned first, unsigned lanes) {
  warp_met[warp_of(static_cast<Number>(first))] = ++now;
  share(first, lanes);
}

// A thread leaves what it knows with a barrier, or takes what is there.
void release(Number thread, Clock clock) {
  if (!races_watched) return;
  need_clocks();
  join(clock, clock_of(thread));
  unsigned block = block_of(thread), first = thread % threads / emulator::WARP * emulator::WARP;
  for (unsigned i = 0; i <= all_threads(); i++) raise(clock[i], cluster_met);
  for (unsigned i = 0; i < threads; i++) raise(clock[block * threads + i], block_met[block]);
  for (unsigned i = first; i < first + emulator::WARP && i < threads; i++)
    raise(clock[block * threads + i], warp_met[warp_of(thread)]);
  clock[thread] = ++now;
  fence_known[thread] = fenced[thread];
}
void acquire(Number thread, const uint32_t *clock) {
  if (!races_watched) return;
  need_clocks();
  join(clock_of(thread), clock);
}
// Whether a thread knows all of that, which was complete at that time.
bool covers(Number thread, const uint32_t *clock, uint32_t time) {
  if (time < cluster_met || time < block_met[block_of(thread)]) return true;
  if (!clocks) return false;
  const uint32_t *own = clock_of(thread);
  for (unsigned i = 0; i < all_threads(); i++)
    if (own[i] < clock[i] && clock[i] > block_met[block_of(thread)] && i != thread) return false;
  return true;
}
// A copy that no thread made is done, and the barrier knows.
void release_async(Clock clock) {
  if (races_watched) clock[all_threads()] = ++now;
}

void fence_async_of(Number thread) { fenced[thread] = ++now; }

// Whether something that a thread did at that time comes before what `thread` does now.
bool known(Number other, uint32_t time, Number thread) {
  if (time < cluster_met) return true;
  unsigned block = block_of(other);
  if (block == block_of(thread) && time < block_met[block]) return true;
  if (other == thread || (warp_of(other) == warp_of(thread) && time < warp_met[warp_of(thread)])) return true;
  return clocks && time < clock_of(thread)[entry_of(other)];
}

}  // namespace
