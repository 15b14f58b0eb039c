// Races: two accesses of a byte by different threads, one of them a write, that nothing orders.
//
// What orders: within a block __syncthreads, within a warp __syncwarp too; shuffles, votes, ldmatrix and mma do not
// (CUDA programming guide, "Warp Shuffle Functions": they imply no memory barrier). Blocks of a launch are never
// ordered, launches always are. Atomics do not race with each other. A copy of cp.async is in flight from its issue
// until it lands: whoever touches its destination in between races with it, its own thread too.
#pragma once
#include "memory.h"

#include <stdlib.h>

namespace {

constexpr unsigned MOST_WARPS = 1024 / emulator::WARP;

// ATOMIC_WRITES: by more than one thread. COPY: still in flight.
enum Kind : uint16_t { READ, WRITE, ATOMIC_READ, ATOMIC_WRITE, ATOMIC_WRITES, COPY };
constexpr const char *KIND_NAMES[] = {"reads", "writes", "reads", "changes", "(and others) changes", "copies to"};

struct Access {
  uint32_t time;  // 0: never
  uint32_t where;
  uint16_t thread;
  Kind kind;
};
// Where in the text: a line, or an address of code that the driver turns into one.
constexpr uint32_t IS_LINE = 1u << 31;

// Of every byte the last write and two reads. More reads are not needed: if a third one races with a later write, one
// of these does, as long as they are of two warps or, all being of one warp, of two threads.
struct Cell {
  Access write, reads[2];
};

bool races_watched;  // the program was built for it
// Times count barriers. Of every event that orders the last time: a launch, a block, __syncthreads, __syncwarp.
uint32_t now, launch_began, block_began, block_met, warp_met[MOST_WARPS];
Cell *shared_cells, **buffer_cells;

void order_launch() { launch_began = ++now; }
void order_block() {
  block_began = block_met = ++now;
  memset(warp_met, 0, sizeof warp_met);
}
void order_threads() { block_met = ++now; }
void order_warp(unsigned warp) { warp_met[warp] = ++now; }

bool is_write(Kind kind) { return kind != READ && kind != ATOMIC_READ; }
bool is_atomic(Kind kind) { return kind == ATOMIC_READ || kind == ATOMIC_WRITE || kind == ATOMIC_WRITES; }
unsigned warp_of(const Access &access) { return access.thread / emulator::WARP; }

// Whether an access comes before what `thread` does now. Shared memory of another block is other memory.
bool ordered(const Access &access, unsigned thread, bool in_shared) {
  if (access.time < launch_began) return true;
  if (access.time < block_began) return in_shared;
  if (access.kind == COPY) return false;
  if (access.time < block_met) return true;
  if (access.kind == ATOMIC_WRITES) return false;
  unsigned warp = warp_of(access);
  return access.thread == thread || (warp == thread / emulator::WARP && access.time < warp_met[warp]);
}

// Whether a byte that both touch makes a race.
bool conflict(const Access &before, const Access &access, bool in_shared) {
  return !(is_atomic(before.kind) && is_atomic(access.kind)) && !ordered(before, access.thread, in_shared);
}

const char *place_of(uint32_t where, char (&text)[32]) {
  bool known = where & IS_LINE;
  snprintf(text, sizeof text, known ? "line %u" : "@%x@", known ? where & ~IS_LINE : where);
  return text;
}

[[noreturn]] void report_race(const Access &one, const Access &other, const char *name, size_t byte) {
  char place[2][32];
  bool apart = other.time < block_began;
  report(FAULT, "race: thread %u %s byte %zu of %s at %s, thread %u%s %s it at %s, and %s", one.thread,
         KIND_NAMES[one.kind], byte, name, place_of(one.where, place[0]), other.thread, apart ? " of another block" : "",
         KIND_NAMES[other.kind], place_of(other.where, place[1]),
         other.kind == COPY ? "that copy was not awaited" : "nothing orders the two");
}

// Whether a read that is kept can give its place to this one: no later write can race with it and not with this one.
bool replaced(const Access &kept, const Access &access, bool in_shared) {
  if (kept.time < launch_began) return true;
  if (kept.time < block_began) return in_shared;
  if (kept.time < block_met || kept.thread == access.thread) return true;
  return warp_of(kept) == warp_of(access) && kept.time < warp_met[warp_of(kept)];
}

void keep_read(Cell &cell, const Access &access, bool in_shared) {
  Access &first = cell.reads[0], &second = cell.reads[1];
  bool alike = warp_of(first) == warp_of(second) && second.time >= block_began;
  if (replaced(first, access, in_shared))
    first = access;
  else if (alike || replaced(second, access, in_shared))
    second = access;
}

void touch_byte(Cell &cell, const Access &access, const char *name, size_t byte, bool in_shared) {
  const Access write = cell.write;
  if (conflict(write, access, in_shared)) report_race(access, write, name, byte);
  if (!is_write(access.kind)) return keep_read(cell, access, in_shared);
  for (const Access &read : cell.reads)
    if (conflict(read, access, in_shared)) report_race(access, read, name, byte);
  bool several = is_atomic(access.kind) && !ordered(write, access.thread, in_shared);
  cell.write = access;
  if (several) cell.write.kind = ATOMIC_WRITES;
}

void touch(Cell *cell, size_t bytes, const Access &access, const char *name, size_t first, bool in_shared) {
  Cell before = *cell;
  touch_byte(*cell, access, name, first, in_shared);
  const Cell after = *cell;
  const bool changed = memcmp(&after, &before, sizeof before);
  for (size_t i = 1; i < bytes; i++) {  // neighbours mostly have the same past
    if (memcmp(&cell[i], &before, sizeof before))
      touch_byte(cell[i], access, name, first + i, in_shared);
    else if (changed)
      cell[i] = after;
  }
}

Cell *cells_of(size_t bytes) {
  auto *at = mapped(bytes * sizeof(Cell));
  allow(at, bytes * sizeof(Cell), PROT_READ | PROT_WRITE);
  return reinterpret_cast<Cell *>(at);
}

[[noreturn]] void report_outside(const Region &region, const unsigned char *at, uint32_t where) {
  char place[32];
  report(FAULT, "touches byte %td of %s, which has %lu bytes, at %s", at - region.data, region.buffer->name,
         region.buffer->bytes, place_of(where, place));
}

// A copy lands: from now on it is a write like any other.
void watch_landing(unsigned thread, const void *address, size_t bytes, uint32_t where) {
  size_t byte = static_cast<const unsigned char *>(address) - shared.at;
  for (size_t i = 0; i < bytes; i++)
    shared_cells[byte + i].write = {now, where, static_cast<uint16_t>(thread), WRITE};
}

// An access by any thread of the block that runs; memory that threads do not share is nobody's concern.
void watch(unsigned thread, const void *address, size_t bytes, Kind kind, uint32_t where) {
  auto *at = static_cast<const unsigned char *>(address);
  Access access = {now, where, static_cast<uint16_t>(thread), kind};
  if (at >= shared.at && at + bytes <= shared.at + shared.bytes) {
    if (!shared_cells) shared_cells = cells_of(shared.bytes);
    size_t byte = at - shared.at;
    touch(shared_cells + byte, bytes, access, "shared memory", byte, true);
    return;
  }
  const Region *region = region_of(at);
  if (!region) return;
  size_t left = region->data + region->buffer->bytes - at;
  // an update of a narrow element is one of the word around it
  if (is_atomic(kind) && at >= region->data && left < bytes && left < 4) bytes = left;
  // pages tell only of what is a few bytes off, not of what is in the slack
  if (at < region->data || at + bytes > region->data + region->buffer->bytes) report_outside(*region, at, where);
  if (region->buffer->role == emulator::INPUT) return;
  if (!buffer_cells) buffer_cells = static_cast<Cell **>(calloc(emulator_program.buffer_count, sizeof(Cell *)));
  Cell *&cells = buffer_cells[region - regions];
  if (!cells) cells = cells_of(region->buffer->bytes);
  size_t byte = at - region->data;
  touch(cells + byte, bytes, access, region->buffer->name, byte, false);
}

}  // namespace
