// Races: two accesses of a byte by different threads, one of them a write, that nothing orders.
//
// What orders: within a cluster its barriers, within a block __syncthreads, within a warp __syncwarp too, and barriers
// with phases, and named ones, those who arrive before those who wait; shuffles, votes, ldmatrix and mma do not (CUDA
// programming guide, "Warp Shuffle Functions": they imply no memory barrier). Blocks of a launch are not ordered but in
// a cluster, launches always are. Atomics do not race with each other. An asynchronous copy is in flight from its issue
// until it lands: whoever touches its destination in between races with it, its own thread too.
#pragma once
#include "order.h"

namespace {

// ATOMIC_WRITES: by more than one thread. COPY: still in flight.
enum Kind : uint16_t { READ, WRITE, ATOMIC_READ, ATOMIC_WRITE, ATOMIC_WRITES, COPY };
constexpr const char *KIND_NAMES[] = {"reads", "writes", "reads", "changes", "(and others) changes", "copies to"};

struct Access {
  uint32_t time;  // 0: never
  uint32_t where;
  Number thread;
  Kind kind;
};
// Where in the text: a line, or an address of code that the driver turns into one.
constexpr uint32_t IS_LINE = 1u << 31;

// Of every byte the last write and two reads. More reads are not needed: if a third one races with a later write, one
// of these does, as long as they are of two warps or, all being of one warp, of two threads.
struct Cell {
  Access write, reads[2];
};

Cell *shared_cells, **buffer_cells;  // of all blocks' shared memory; of each buffer

bool is_write(Kind kind) { return kind != READ && kind != ATOMIC_READ; }
bool is_atomic(Kind kind) { return kind == ATOMIC_READ || kind == ATOMIC_WRITE || kind == ATOMIC_WRITES; }

// Whether an access comes before what `thread` does now. Shared memory of another block is other memory, but for the
// blocks of a cluster.
bool ordered(const Access &access, Number thread, bool in_shared) {
  if (access.time < launch_began) return true;
  if (access.time < cluster_began) return in_shared;
  if (access.kind == COPY) return false;
  if (access.kind != ATOMIC_WRITES) return known(access.thread, access.time, thread);
  unsigned block = block_of(thread);  // by several threads: none's own
  return access.time < cluster_met || (block == block_of(access.thread) && access.time < block_met[block]);
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

const char *name_of(Number thread, char (&text)[32]) {
  snprintf(text, sizeof text, thread == ASYNC ? "a bulk copy" : "thread %u", thread % threads);
  return text;
}

[[noreturn]] void report_race(const Access &one, const Access &other, const char *name, size_t byte) {
  char place[2][32], who[2][32];
  bool are_threads = one.thread != ASYNC && other.thread != ASYNC;
  bool apart = other.time < cluster_began || (are_threads && block_of(one.thread) != block_of(other.thread));
  report(FAULT, "race: %s %s byte %zu of %s at %s, %s%s %s it at %s, and %s", name_of(one.thread, who[0]),
         KIND_NAMES[one.kind], byte, name, place_of(one.where, place[0]), name_of(other.thread, who[1]),
         apart ? " of another block" : "", KIND_NAMES[other.kind], place_of(other.where, place[1]),
         other.kind == COPY ? "that copy was not awaited" : "nothing orders the two");
}

void keep_read(Cell &cell, const Access &access, bool in_shared) {
  Access &first = cell.reads[0], &second = cell.reads[1];
  bool alike = warp_of(first.thread) == warp_of(second.thread) && second.time >= cluster_began;
  // a read gives its place to one behind it: no later write can race with it and not with that one
  if (ordered(first, access.thread, in_shared))
    first = access;
  else if (alike || ordered(second, access.thread, in_shared))
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

// Of a byte in the shared memory of a block.
Cell *shared_cell(const void *address, unsigned rank) {
  if (!shared_cells) shared_cells = cells_of(shared.bytes * MOST_BLOCKS);
  return shared_cells + rank * shared.bytes + (static_cast<const unsigned char *>(address) - shared_of[rank]);
}

// A copy lands: from now on it is a write like any other.
void watch_landing(Number thread, const void *address, size_t bytes, uint32_t where) {
  Cell *cells = shared_cell(address, block_with(address));
  for (size_t i = 0; i < bytes; i++) cells[i].write = {now, where, thread, WRITE};
}

// An access by any thread of the blocks that run; memory that threads do not share is nobody's concern.
void watch(Number thread, const void *address, size_t bytes, Kind kind, uint32_t where) {
  auto *at = static_cast<const unsigned char *>(address);
  Access access = {now, where, thread, kind};
  unsigned rank = block_with(at);
  if (rank < MOST_BLOCKS && at + bytes <= shared_of[rank] + shared.bytes) {
    touch(shared_cell(at, rank), bytes, access, "shared memory", at - shared_of[rank], true);
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

// A read by the asynchronous proxy. What threads wrote it sees only behind a fence (PTX ISA, "Async proxy"): the thread
// that wrote is to fence and then to meet the one that lets the proxy read.
void watch_async_read(Number thread, const void *address, size_t bytes, uint32_t where) {
  watch(thread, address, bytes, READ, where);
  unsigned rank = block_with(address);
  if (rank == MOST_BLOCKS) return;
  const Cell *cells = shared_cell(address, rank);
  for (size_t i = 0; i < bytes; i++) {
    const Access &write = cells[i].write;
    if (write.time < cluster_began || write.thread == ASYNC) continue;
    if (write.time < (write.thread == thread ? fenced : fence_known)[write.thread]) continue;
    char place[2][32];
    report(FAULT, "%s: an asynchronous read of byte %td of shared memory, which thread %u wrote at %s: there is no "
           "fence_async behind the write, or none before the threads met", place_of(where, place[0]),
           static_cast<const unsigned char *>(address) + i - shared_of[rank], write.thread % threads,
           place_of(write.where, place[1]));
  }
}

}  // namespace
