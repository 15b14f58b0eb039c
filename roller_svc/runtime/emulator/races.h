// Race detector: two unordered accesses of a byte by different threads, one of them a write.
//
// Accesses are ordered by barriers: of a cluster, of a block (__syncthreads), of a warp (__syncwarp), mbarriers and
// named barriers (arrivals before waits). Shuffles, votes, ldmatrix and mma order nothing (CUDA programming guide,
// "Warp Shuffle Functions": they imply no memory barrier). Launches are ordered; blocks only within a cluster. Atomics
// do not race with each other. An asynchronous copy is in flight from its issue until its completion: any access of its
// destination in between is a race, by its own thread too.
#pragma once
#include "order.h"

namespace {

// ATOMIC_WRITES: unordered atomics of several threads. COPY: in flight.
enum Kind : uint16_t { READ, WRITE, ATOMIC_READ, ATOMIC_WRITE, ATOMIC_WRITES, COPY };
constexpr const char *KIND_NAMES[] = {"reads", "writes", "reads", "changes", "(and others) changes", "copies to"};

struct Access {
  uint32_t time;  // 0: never
  uint32_t where;
  Number thread;
  Kind kind;
};
// Location in the source: a line, or a code address that the Python side resolves to a line.
constexpr uint32_t IS_LINE = 1u << 31;

// Shadow memory of a byte: the last write and two reads. Two reads suffice: if a third one races with a later write,
// one of these does, provided they are by two warps or, if all are by one warp, by two threads.
struct Cell {
  Access write, reads[2];
};

Cell *shared_cells, **buffer_cells;  // of all blocks' shared memory; of each buffer

bool is_write(Kind kind) { return kind != READ && kind != ATOMIC_READ; }
bool is_atomic(Kind kind) { return kind == ATOMIC_READ || kind == ATOMIC_WRITE || kind == ATOMIC_WRITES; }

// Whether an access happens before what `thread` does now. Blocks outside a cluster have distinct shared memory.
bool ordered(const Access &access, Number thread, bool in_shared) {
  if (access.time < launch_began) return true;
  if (access.time < cluster_began) return in_shared;
  if (access.kind == COPY) return false;
  if (access.kind != ATOMIC_WRITES) return happens_before(access.thread, access.time, thread);
  unsigned block = block_of(thread);  // by several threads: none's own
  return access.time < cluster_sync_time || (block == block_of(access.thread) && access.time < block_sync_times[block]);
}

// Whether two accesses of the same byte are a race.
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

void store_read(Cell &cell, const Access &access, bool in_shared) {
  Access &first = cell.reads[0], &second = cell.reads[1];
  bool alike = warp_of(first.thread) == warp_of(second.thread) && second.time >= cluster_began;
  // a read is replaced by one that it happens before: a later write that races with it races with that one, too
  if (ordered(first, access.thread, in_shared))
    first = access;
  else if (alike || ordered(second, access.thread, in_shared))
    second = access;
}

void check_byte(Cell &cell, const Access &access, const char *name, size_t byte, bool in_shared) {
  const Access write = cell.write;
  if (conflict(write, access, in_shared)) report_race(access, write, name, byte);
  if (!is_write(access.kind)) return store_read(cell, access, in_shared);
  for (const Access &read : cell.reads)
    if (conflict(read, access, in_shared)) report_race(access, read, name, byte);
  bool several = is_atomic(access.kind) && !ordered(write, access.thread, in_shared);
  cell.write = access;
  if (several) cell.write.kind = ATOMIC_WRITES;
}

void check_bytes(Cell *cell, size_t bytes, const Access &access, const char *name, size_t first, bool in_shared) {
  Cell before = *cell;
  check_byte(*cell, access, name, first, in_shared);
  const Cell after = *cell;
  const bool changed = memcmp(&after, &before, sizeof before);
  for (size_t i = 1; i < bytes; i++) {  // adjacent bytes mostly have the same history
    if (memcmp(&cell[i], &before, sizeof before))
      check_byte(cell[i], access, name, first + i, in_shared);
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

// Shadow memory of a byte in the shared memory of a block.
Cell *shared_cell(const void *address, unsigned rank) {
  if (!shared_cells) shared_cells = cells_of(shared.bytes * MAX_BLOCKS);
  return shared_cells + rank * shared.bytes + (static_cast<const unsigned char *>(address) - shared_of[rank]);
}

// A copy completes: from now on it is an ordinary write.
void record_completion(Number thread, const void *address, size_t bytes, uint32_t where) {
  Cell *cells = shared_cell(address, block_with(address));
  for (size_t i = 0; i < bytes; i++) cells[i].write = {now, where, thread, WRITE};
}

bool waited[MAX_BLOCKS * MAX_THREADS];  // of each thread: for the launches before a programmatic one

// Check that a thread accesses memory only after it has waited for the launches that may still write or read it.
void check_waited(Number thread, const Region &region, const unsigned char *at, uint32_t where) {
  if (!launch->programmatic || region.buffer->constant || thread == ASYNC || waited[thread]) return;
  char place[32];
  report(FAULT, "touches byte %td of %s at %s before grid_wait: launches before this one may not have ended",
         at - region.data, region.buffer->name, place_of(where, place));
}

// Record an access by a thread of the running blocks. Thread-private memory is ignored.
void record_access(Number thread, const void *address, size_t bytes, Kind kind, uint32_t where) {
  auto *at = static_cast<const unsigned char *>(address);
  Access access = {now, where, thread, kind};
  unsigned rank = block_with(at);
  if (rank < MAX_BLOCKS && at + bytes <= shared_of[rank] + shared.bytes) {
    check_bytes(shared_cell(at, rank), bytes, access, "shared memory", at - shared_of[rank], true);
    return;
  }
  const Region *region = region_of(at);
  if (!region) return;
  size_t left = region->data + region->buffer->bytes - at;
  // an update of a narrow element is one of the word around it
  if (is_atomic(kind) && at >= region->data && left < bytes && left < 4) bytes = left;
  // guard pages do not detect accesses of the redzone
  if (at < region->data || at + bytes > region->data + region->buffer->bytes) report_outside(*region, at, where);
  check_waited(thread, *region, at, where);
  if (region->buffer->role == emulator::INPUT) return;
  if (!buffer_cells) buffer_cells = static_cast<Cell **>(calloc(emulator_program.buffer_count, sizeof(Cell *)));
  Cell *&cells = buffer_cells[region - regions];
  if (!cells) cells = cells_of(region->buffer->bytes);
  size_t byte = at - region->data;
  check_bytes(cells + byte, bytes, access, region->buffer->name, byte, false);
}

// Record a read by the async proxy, which sees writes of threads only after a proxy fence (PTX ISA, "Async proxy"): the
// writing thread fences, then synchronises with the thread that issues the read.
void record_async_read(Number thread, const void *address, size_t bytes, uint32_t where) {
  record_access(thread, address, bytes, READ, where);
  unsigned rank = block_with(address);
  if (rank == MAX_BLOCKS) return;
  const Cell *cells = shared_cell(address, rank);
  for (size_t i = 0; i < bytes; i++) {
    const Access &write = cells[i].write;
    if (write.time < cluster_began || write.thread == ASYNC) continue;
    if (write.time < (write.thread == thread ? fenced : fence_known)[write.thread]) continue;
    char place[2][32];
    report(FAULT, "%s: an asynchronous read of byte %td of shared memory, which thread %u wrote at %s: there is no "
           "fence_async after the write, or none before the threads synchronised", place_of(where, place[0]),
           static_cast<const unsigned char *>(address) + i - shared_of[rank], write.thread % threads,
           place_of(write.where, place[1]));
  }
}

}  // namespace
