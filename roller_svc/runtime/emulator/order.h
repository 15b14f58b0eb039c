// The happens-before relation, from barrier times and vector clocks.
//
// Barriers of a whole cluster, block or warp are recorded as times: everything before one happens before everything
// after it. Mbarriers and named barriers synchronise any set of threads: where they are used, every thread also has a
// vector clock.
#pragma once
#include "memory.h"

#include <stdlib.h>

namespace {

constexpr unsigned MAX_THREADS = 1024;  // of a block
constexpr unsigned MAX_WARPS = MAX_THREADS / emulator::WARP;

// Threads are numbered through the blocks of a cluster. Copies that no thread makes have a number for all of them.
typedef uint16_t Number;
constexpr Number ASYNC = 0xffff;

bool race_detection;  // the program was built for it
// Times of the last event of each kind.
uint32_t now, launch_began, cluster_began, cluster_sync_time;
uint32_t block_sync_times[MAX_BLOCKS], warp_sync_times[MAX_BLOCKS * MAX_WARPS];
// When each thread last fenced its writes for the async proxy, and the latest such fence that others have synchronised
// with.
uint32_t fenced[MAX_BLOCKS * MAX_THREADS], fence_known[MAX_BLOCKS * MAX_THREADS];

typedef uint32_t *Clock;  // an entry a thread, one for ASYNC
uint32_t *clocks;         // all threads'; null until a barrier needs them
size_t clock_bytes;

unsigned all_threads() { return block_count * threads; }
unsigned block_of(Number number) { return number == ASYNC ? MAX_BLOCKS : number / threads; }
unsigned warp_of(Number number) {
  return number == ASYNC ? MAX_BLOCKS * MAX_WARPS : block_of(number) * MAX_WARPS + number % threads / emulator::WARP;
}
unsigned entry_of(Number number) { return number == ASYNC ? all_threads() : number; }
Clock clock_of(Number number) { return clocks + size_t(number) * (all_threads() + 1); }

void raise(uint32_t &time, uint32_t least) {
  if (time < least) time = least;
}
void merge(Clock to, const uint32_t *from) {
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

void create_clocks() {
  if (clocks) return;
  clock_bytes = rounded(size_t(all_threads()) * (all_threads() + 1) * sizeof(uint32_t), PAGE);
  clocks = reinterpret_cast<uint32_t *>(mapped(clock_bytes));
  allow(reinterpret_cast<unsigned char *>(clocks), clock_bytes, PROT_READ | PROT_WRITE);
}

void order_launch() { launch_began = ++now; }

void order_begin() {  // of blocks that run together
  cluster_began = cluster_sync_time = ++now;
  memset(block_sync_times, 0, sizeof block_sync_times);
  memset(warp_sync_times, 0, sizeof warp_sync_times);
  drop_clocks();
}

// Threads first .. first + count - 1 have synchronised.
void merge_clocks(unsigned first, unsigned count) {
  if (!race_detection) return;
  memcpy(fence_known + first, fenced + first, count * sizeof *fenced);
  if (!clocks) return;
  Clock all = clock_of(static_cast<Number>(first));
  for (unsigned i = 1; i < count; i++) merge(all, clock_of(static_cast<Number>(first + i)));
  for (unsigned i = 1; i < count; i++)
    memcpy(clock_of(static_cast<Number>(first + i)), all, (all_threads() + 1) * sizeof *all);
}
void order_cluster() {
  cluster_sync_time = ++now;
  if (race_detection) memcpy(fence_known, fenced, all_threads() * sizeof *fenced);
}
void order_block(unsigned rank) {
  block_sync_times[rank] = ++now;
  merge_clocks(rank * threads, threads);
}
void order_warp(unsigned first, unsigned lanes) {
  warp_sync_times[warp_of(static_cast<Number>(first))] = ++now;
  merge_clocks(first, lanes);
}

// Release: merge a thread's clock into a barrier's. Acquire: the reverse.
void release(Number thread, Clock clock) {
  if (!race_detection) return;
  create_clocks();
  merge(clock, clock_of(thread));
  unsigned block = block_of(thread), first = thread % threads / emulator::WARP * emulator::WARP;
  for (unsigned i = 0; i <= all_threads(); i++) raise(clock[i], cluster_sync_time);
  for (unsigned i = 0; i < threads; i++) raise(clock[block * threads + i], block_sync_times[block]);
  for (unsigned i = first; i < first + emulator::WARP && i < threads; i++)
    raise(clock[block * threads + i], warp_sync_times[warp_of(thread)]);
  clock[thread] = ++now;
  fence_known[thread] = fenced[thread];
}
void acquire(Number thread, const uint32_t *clock) {
  if (!race_detection) return;
  create_clocks();
  merge(clock_of(thread), clock);
}
// Whether everything in the clock, completed at `time`, happens before what the thread does now.
bool covers(Number thread, const uint32_t *clock, uint32_t time) {
  if (time < cluster_sync_time || time < block_sync_times[block_of(thread)]) return true;
  if (!clocks) return false;
  const uint32_t *own = clock_of(thread);
  for (unsigned i = 0; i < all_threads(); i++)
    if (own[i] < clock[i] && clock[i] > block_sync_times[block_of(thread)] && i != thread) return false;
  return true;
}
// An asynchronous copy has completed and signalled the barrier.
void release_async(Clock clock) {
  if (race_detection) clock[all_threads()] = ++now;
}

void fence_async_of(Number thread) { fenced[thread] = ++now; }

// Whether what `other` did at `time` happens before what `thread` does now.
bool happens_before(Number other, uint32_t time, Number thread) {
  if (time < cluster_sync_time) return true;
  unsigned block = block_of(other);
  if (block == block_of(thread) && time < block_sync_times[block]) return true;
  if (other == thread || (warp_of(other) == warp_of(thread) && time < warp_sync_times[warp_of(thread)])) return true;
  return clocks && time < clock_of(thread)[entry_of(other)];
}

}  // namespace
