// TMA copies of boxes of a tensor (PTX ISA, "cp.async.bulk.tensor").
//
// Loads complete when no thread can run, in an order that depends on the seed; until then the destination is poison.
// The source of a store must not change until its thread has waited for the read. Stores write when their thread waits
// for that, or at its end.
#pragma once
#include "copies.h"
#include "events.h"

namespace {

constexpr int MAX_DIMENSIONS = 5;
constexpr size_t BULK_ALIGNMENT = 128;  // of boxes in shared memory

// Swizzle of 16-byte chunks: XOR address bits 4-6 with bits 7-9, as many bits as number the chunks of the swizzle span
// (CUDA programming guide, "Tensor Map Swizzle Modes"; CUTLASS, Swizzle<B, 4, 3>).
size_t swizzled(size_t offset, int swizzle) {
  size_t chunks = swizzle ? swizzle / 16 - 1 : 0;
  return offset ^ (offset >> 3 & chunks << 4);
}

struct Box {
  TensorMap map;  // the parameter ends with its thread
  int at[MAX_DIMENSIONS];
  int skips[3];  // im2col: what the filter's tap adds
  size_t offset;  // in shared memory
  int line;
  Number thread;
  uint3 position;  // of the thread
};

size_t row_bytes(const TensorMap &map) { return size_t(map.box[0]) * map.element_bytes; }

size_t row_count(const TensorMap &map) { return map.bytes / row_bytes(map); }

// Coordinates of a box's rows, one after another.
struct Rows {
  const Box &box;
  const TensorMap &map;
  long long at[MAX_DIMENSIONS];  // of the row's first element

  explicit Rows(const Box &box) : box(box), map(box.map) {
    for (int d = 0; d < map.rank; d++) at[d] = box.at[d];
  }
  long long extent(int d) const { return static_cast<long long>(map.extents[d]); }
  void advance() { map.pixels ? next_pixel() : next_row(); }
  void next_row() {
    for (int d = 1; d < map.rank; d++) {
      at[d] += map.steps[d];
      if (at[d] < box.at[d] + static_cast<long long>(map.box[d])) return;
      at[d] = box.at[d];
    }
  }
  void next_pixel() {  // within the corners, in steps; then on to the next row of pixels, and to the next image
    for (int d = 1; d < map.rank - 1; d++) {
      at[d] += map.steps[d];
      if (at[d] < extent(d) + map.upper[d - 1]) return;
      at[d] = map.lower[d - 1];
    }
    at[map.rank - 1]++;
  }
  // Return the row's first element inside the tensor, `first` elements into the row, and the `count` of such elements.
  unsigned char *memory(long long &first, long long &count) const {
    unsigned char *address = map.data;
    for (int d = 1; d < map.rank; d++) {
      bool spatial = map.pixels && d < map.rank - 1;
      long long place = at[d] + (spatial ? box.skips[d - 1] : 0);
      if (place < 0 || place >= extent(d)) return nullptr;
      address += place * static_cast<long long>(map.strides[d]);
    }
    first = at[0] < 0 ? -at[0] : 0;
    count = extent(0) - at[0] < map.box[0] ? extent(0) - at[0] : map.box[0];
    count = count > first ? count - first : 0;
    if (!count) return nullptr;
    address += (at[0] + first) * map.element_bytes;
    check_inside(address, count * map.element_bytes);
    return address;
  }
  void check_inside(const unsigned char *address, long long bytes) const {
    const Region *region = region_of(map.data);
    if (!region || address < region->data || address + bytes > region->data + region->buffer->bytes)
      report(FAULT, "line %d: the map %s exceeds %s", box.line, map.name, map.buffer);
  }
};

// Call work(address in shared memory, row's byte, bytes) for each contiguous part of a row of the box.
template <class Work> void parts(const Box &box, size_t row, unsigned rank, Work work) {
  size_t bytes = row_bytes(box.map), start = box.offset + row * bytes;
  size_t at_once = box.map.swizzle_bytes ? 16 : bytes;
  for (size_t i = 0; i < bytes; i += at_once)
    work(shared_at(swizzled(start + i, box.map.swizzle_bytes), rank), i, at_once);
}

void check_box(const TensorMap &map, const void *shared_address, size_t available, int rank, bool im2col, int line) {
  if (map.rank != rank || map.pixels != im2col)
    report(FAULT, "line %d: %s is a map of %d dimensions%s", line, map.name, map.rank, map.pixels ? ", im2col" : "");
  if (const Region *region = region_of(map.data))
    check_waited(current->number, *region, map.data, IS_LINE | static_cast<uint32_t>(line));
  size_t bytes = map.bytes;
  if (available < bytes) report(FAULT, "line %d: a box of %zu bytes leaves its shared array", line, bytes);
  if (!in_shared(shared_address, bytes))
    report(FAULT, "line %d: a box of %zu bytes leaves the block's shared memory", line, bytes);
  if (shared_offset(shared_address, running) % BULK_ALIGNMENT)
    report(FAULT, "line %d: a box at shared byte %zu, which is not a multiple of %zu", line,
           shared_offset(shared_address, running), BULK_ALIGNMENT);
  if (map.swizzle_bytes && row_bytes(map) != map.swizzle_bytes)
    report(FAULT, "line %d: rows of %zu bytes in a swizzle of %u: their layout is undocumented", line,
           row_bytes(map), map.swizzle_bytes);
}

// loads ---------------------------------------------------------------------------------------------------------------

struct Flight {
  Box box;
  unsigned rank;  // of the block it goes to
  Phased *barrier;
};
Flight *flights;
unsigned flight_count, flight_capacity;

void poison_box(const Flight &flight) {
  const Box &box = flight.box;
  size_t bytes = box.map.bytes;
  unsigned char *to = shared_at(box.offset, flight.rank);
  if (race_detection) record_access(box.thread, to, bytes, COPY, IS_LINE | static_cast<uint32_t>(box.line));
  memset(to, POISON, bytes);
}

void add_flight(const Flight &flight) {
  if (flight_count == flight_capacity) {
    flight_capacity = flight_capacity ? 2 * flight_capacity : 64;
    flights = static_cast<Flight *>(realloc(flights, flight_capacity * sizeof(Flight)));
    if (!flights) failed("realloc");
  }
  flights[flight_count++] = flight;
  poison_box(flight);
}

void round_row(unsigned char *row, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 4) {
    unsigned word;
    memcpy(&word, row + i, 4);
    word = round_tf32(word);
    memcpy(row + i, &word, 4);
  }
}

void complete_copy(const Flight &flight) {
  const Box &box = flight.box;
  const TensorMap &map = box.map;
  const uint32_t where = IS_LINE | static_cast<uint32_t>(box.line);
  size_t bytes = row_bytes(map), count = row_count(map);
  Rows rows(box);
  static unsigned char line[1 << 12];  // 256 elements of 8 bytes are the longest row
  for (size_t row = 0; row < count; row++, rows.advance()) {
    long long first = 0, inside = 0;
    const unsigned char *from = rows.memory(first, inside);
    memset(line, 0, bytes);
    if (from) {
      if (race_detection) record_access(box.thread, from, inside * map.element_bytes, READ, where);
      memcpy(line + first * map.element_bytes, from, inside * map.element_bytes);
    }
    if (map.tf32) round_row(line, bytes);
    parts(box, row, flight.rank, [](unsigned char *to, size_t i, size_t part) { memcpy(to, line + i, part); });
  }
  size_t all = map.bytes;
  if (race_detection) record_completion(ASYNC, shared_at(box.offset, flight.rank), all, where);
  check_word(*flight.barrier, box.line);
  arrive_bytes(*flight.barrier, static_cast<long>(all), box.line);
}

// copies that a barrier tracks: one of contiguous bytes, or all of a thread's cp.async ------------------------------

struct Tracked {
  Copy *copies;
  unsigned count;
  bool arrives;  // once they are complete; else their bytes do
  int line;
  Number thread;
  uint3 position;  // of the thread
  unsigned rank;   // of its block
  Phased *barrier;
};
Tracked *tracked;
unsigned tracked_count, tracked_capacity;

void track(const Copy *copies, unsigned count, Phased &barrier, bool arrives, int line) {
  if (tracked_count == tracked_capacity) {
    tracked_capacity = tracked_capacity ? 2 * tracked_capacity : 256;
    tracked = static_cast<Tracked *>(realloc(tracked, tracked_capacity * sizeof(Tracked)));
    if (!tracked) failed("realloc");
  }
  auto *own = static_cast<Copy *>(malloc((count + 1) * sizeof(Copy)));
  if (!own) failed("malloc");
  if (count) memcpy(own, copies, count * sizeof(Copy));
  tracked[tracked_count++] = {own, count, arrives, line, current->number, current->position, running, &barrier};
}

void complete_bytes(const Copy &copy, Number thread) {
  if (race_detection) {
    uint32_t where = IS_LINE | static_cast<uint32_t>(copy.line);
    if (copy.inside) record_access(thread, copy.from, copy.bytes, READ, where);
    record_completion(ASYNC, copy.to, copy.bytes, where);
  }
  if (copy.inside)
    memcpy(copy.to, copy.from, copy.bytes);
  else
    memset(copy.to, 0, copy.bytes);
}

void complete_tracked(unsigned i) {
  const Tracked done = tracked[i];
  tracked_count--;
  memmove(tracked + i, tracked + i + 1, (tracked_count - i) * sizeof(Tracked));
  threadIdx = done.position;
  blockIdx = blocks[done.rank].position;
  long bytes = 0;
  for (unsigned number = 0; number < done.count; number++) {
    complete_bytes(done.copies[number], done.thread);
    bytes += done.copies[number].bytes;
  }
  free(done.copies);
  Phased &barrier = *done.barrier;
  check_word(barrier, done.line);
  if (!done.arrives) return arrive_bytes(barrier, bytes, done.line);
  if (!barrier.pending)
    report(FAULT, "line %d: more than %u threads arrive at the barrier initialised at line %d", done.line,
           barrier.count, barrier.line);
  barrier.pending--;
  release_async_to(barrier.known);
  complete_phase(barrier, done.line);
}

void drop_tracked() {
  while (tracked_count) free(tracked[--tracked_count].copies);
}

bool complete_async() {
  if (!flight_count && !tracked_count) return false;
  unsigned i = random_below(flight_count + tracked_count);
  if (i >= flight_count) return complete_tracked(i - flight_count), true;
  Flight flight = flights[i];
  flight_count--;
  memmove(flights + i, flights + i + 1, (flight_count - i) * sizeof(Flight));
  threadIdx = flight.box.position;
  blockIdx = blocks[block_of(flight.box.thread)].position;
  complete_copy(flight);
  return true;
}

Box box_of(const TensorMap *map, const void *shared_address, const int *at, int line) {
  Box box = {*map, {}, {}, shared_offset(shared_address, running), line, current->number, current->position};
  for (int d = 0; d < map->rank; d++) box.at[d] = at[d];
  return box;
}

// stores --------------------------------------------------------------------------------------------------------------

struct Store {
  Box box;
  unsigned char *data;  // as it was at the issue
  bool read;
  unsigned group;
};

void issue_store(Store &store) {
  const Box &box = store.box;
  size_t bytes = row_bytes(box.map), count = row_count(box.map);
  store.data = static_cast<unsigned char *>(malloc(bytes * count));
  if (!store.data) failed("malloc");
  for (size_t row = 0; row < count; row++)
    parts(box, row, running, [&](const unsigned char *from, size_t i, size_t part) {
      memcpy(store.data + row * bytes + i, from, part);
    });
}

// The source must not change between issue and wait, because hardware reads it at any time in between.
void read_store(Store &store) {
  const Box &box = store.box;
  const uint32_t where = IS_LINE | static_cast<uint32_t>(box.line);
  size_t bytes = row_bytes(box.map), count = row_count(box.map);
  for (size_t row = 0; row < count; row++)
    parts(box, row, running, [&](const unsigned char *from, size_t i, size_t part) {
      if (race_detection) record_access(box.thread, from, part, READ, where);
      if (memcmp(store.data + row * bytes + i, from, part))
        report(FAULT, "line %d: shared memory was written before this store was awaited", box.line);
    });
  store.read = true;
}

void write_store(Store &store) {
  const Box &box = store.box;
  const TensorMap &map = box.map;
  size_t bytes = row_bytes(map), count = row_count(map);
  Rows rows(box);
  for (size_t row = 0; row < count; row++, rows.advance()) {
    long long first = 0, inside = 0;
    unsigned char *to = rows.memory(first, inside);
    if (!to) continue;
    size_t part = inside * map.element_bytes;
    if (race_detection) record_access(box.thread, to, part, WRITE, IS_LINE | static_cast<uint32_t>(box.line));
    memcpy(to, store.data + row * bytes + first * map.element_bytes, part);
  }
  free(store.data);
}

struct Stores {
  Store *pending;
  unsigned count, capacity;
  unsigned group;  // the one that new stores belong to
};

Stores &stores_of(Fiber &fiber) {
  if (!fiber.stores) fiber.stores = static_cast<Stores *>(calloc(1, sizeof(Stores)));
  if (!fiber.stores) failed("calloc");
  return *fiber.stores;
}

void end_bulk() {
  if (!current->stores) return;
  Stores &stores = *current->stores;
  for (unsigned i = 0; i < stores.count; i++) {
    if (!stores.pending[i].read)
      report(FAULT, "line %d: the thread ends without awaiting that this store has read", stores.pending[i].box.line);
    write_store(stores.pending[i]);
  }
  stores.count = stores.group = 0;
}

void end_flights(const Block &block) {
  for (unsigned i = 0; i < flight_count; i++)
    if (flights[i].rank == block.rank)
      report(FAULT, "line %d: this copy is under way when the block ends that it goes to", flights[i].box.line);
  for (unsigned i = 0; i < tracked_count; i++)
    if (tracked[i].rank == block.rank)
      report(FAULT, "line %d: this copy is under way when the block ends that it goes to", tracked[i].line);
}

}  // namespace

void emulator::load(void *to, unsigned long available, void *barrier, const BulkLoad &load, int line) {
  check_box(*load.map, to, available, load.rank, load.im2col, line);
  Flight flight = {box_of(load.map, to, load.at, line), running, nullptr};
  for (int d = 0; load.im2col && d < load.rank - 2; d++) flight.box.skips[d] = load.offsets[d];
  unsigned mask = load.multicast ? load.mask : 1u << running;
  if (!mask || mask >> block_count)
    report(FAULT, "line %d: copies to blocks %#x of a cluster of %u", line, mask, block_count);
  size_t offset = offset_of_barrier(barrier, line);
  for (unsigned rank = 0; rank < block_count; rank++) {
    if (!(mask >> rank & 1)) continue;
    if (blocks[rank].finished == threads) report(FAULT, "line %d: copies to block %u, which has ended", line, rank);
    flight.rank = rank;
    flight.barrier = &barrier_of(offset, rank, line);
    if (!flight.barrier->fenced)
      report(FAULT, "line %d: copies before fence_barrier_init makes the barrier of line %d known to them", line,
             flight.barrier->line);
    add_flight(flight);
  }
}

void emulator::store(const TensorMap *map, const void *from, unsigned long available, int rank, const int *at,
                     int line) {
  check_box(*map, from, available, rank, false, line);
  if (region_of(map->data)->buffer->role == INPUT) report(FAULT, "line %d: stores to an input, %s", line, map->name);
  Stores &stores = stores_of(*current);
  if (stores.count == stores.capacity) {
    stores.capacity = stores.capacity ? 2 * stores.capacity : 4;
    stores.pending = static_cast<Store *>(realloc(stores.pending, stores.capacity * sizeof(Store)));
    if (!stores.pending) failed("realloc");
  }
  if (race_detection)
    record_async_read(current->number, from, map->bytes, IS_LINE | static_cast<uint32_t>(line));
  Store &store = stores.pending[stores.count++];
  store = {box_of(map, from, at, line), nullptr, false, stores.group};
  issue_store(store);
}

void bulk_commit() { stores_of(*current).group++; }

void emulator::await_stores(unsigned int pending, bool read) {
  Stores &stores = stores_of(*current);
  unsigned done = 0;
  for (unsigned i = 0; i < stores.count && stores.pending[i].group + pending < stores.group; i++) {
    if (!stores.pending[i].read) read_store(stores.pending[i]);
    if (read) continue;
    write_store(stores.pending[i]);
    done++;
  }
  stores.count -= done;
  memmove(stores.pending, stores.pending + done, stores.count * sizeof(Store));
}

void emulator::arrive_after_copies(void *at, int line) {
  Copies &copies = current->copies;
  track(copies.pending, copies.count, own_barrier(at, line), true, line);
  copies.count = 0;
}

void emulator::copy_bulk(void *shared, unsigned long available, const void *memory, unsigned int bytes, void *at,
                         int line) {
  auto *to = static_cast<unsigned char *>(shared);
  auto *from = static_cast<const unsigned char *>(memory);
  if (!bytes || bytes % 16) report(FAULT, "line %d: copies %u bytes, which is no multiple of 16", line, bytes);
  if (!in_shared(to, bytes)) report(FAULT, "line %d: copies to an address outside the block's shared memory", line);
  if (available < bytes) report(FAULT, "line %d: copies %u bytes beyond the end of a shared array", line, bytes);
  if (shared_offset(to, running) % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    report(FAULT, "line %d: copies from or to an address that is not a multiple of 16", line);
  check_source(from, bytes, line);
  Phased &barrier = own_barrier(at, line);
  if (!barrier.fenced)
    report(FAULT, "line %d: copies before fence_barrier_init makes the barrier of line %d known to them", line,
           barrier.line);
  barrier.bytes += bytes;
  if (barrier.bytes > MAX_ARRIVALS) report(FAULT, "line %d: a barrier cannot expect %ld bytes", line, barrier.bytes);
  if (race_detection) record_access(current->number, to, bytes, COPY, IS_LINE | static_cast<uint32_t>(line));
  memset(to, POISON, bytes);
  const Copy copy = {to, from, bytes, true, 0, line};
  track(&copy, 1, barrier, false, line);
}

void fence_async() {
  if (race_detection) fence_async_of(current->number);
}
