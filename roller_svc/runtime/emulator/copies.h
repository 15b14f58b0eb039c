// cp.async: a copy completes when its thread waits for it, never earlier. Until then the destination is poison.
#pragma once
#include "warps.h"

namespace {

void complete_copy(const Copy &copy) {
  if (race_detection) {
    uint32_t where = IS_LINE | static_cast<uint32_t>(copy.line);
    if (copy.inside) record_access(current->number, copy.from, copy.bytes, READ, where);
    record_completion(current->number, copy.to, copy.bytes, where);
  }
  if (copy.inside)
    memcpy(copy.to, copy.from, copy.bytes);
  else
    memset(copy.to, 0, copy.bytes);
}

void append(Copies &copies, const Copy &copy) {
  if (copies.count == copies.capacity) {
    copies.capacity = copies.capacity ? 2 * copies.capacity : 32;
    copies.pending = static_cast<Copy *>(realloc(copies.pending, copies.capacity * sizeof(Copy)));
    if (!copies.pending) failed("realloc");
  }
  copies.pending[copies.count++] = copy;
}

// Check that all bytes are inside a buffer, not in the redzone behind it.
void check_source(const unsigned char *from, unsigned bytes, int line) {
  const Region *region = region_of(from);
  if (!region) report(FAULT, "line %d: copies from an address outside all buffers", line);
  if (from < region->data || from + bytes > region->data + region->buffer->bytes)
    report(FAULT, "line %d: copies %u bytes at byte %td of %s, which has %lu bytes", line, bytes, from - region->data,
           region->buffer->name, region->buffer->bytes);
  check_waited(current->number, *region, from, IS_LINE | static_cast<uint32_t>(line));
}

}  // namespace

void emulator::copy(void *shared, unsigned long available, const void *memory, unsigned int bytes, bool inside,
                    int line) {
  auto *to = static_cast<unsigned char *>(shared);
  auto *from = static_cast<const unsigned char *>(memory);
  if (!in_shared(to, bytes)) report(FAULT, "line %d: copies to an address outside the block's shared memory", line);
  if (available < bytes) report(FAULT, "line %d: copies %u bytes beyond the end of a shared array", line, bytes);
  if (reinterpret_cast<uintptr_t>(to) % bytes)
    report(FAULT, "line %d: copies %u bytes to a shared address that is not a multiple of %u", line, bytes, bytes);
  if (inside && reinterpret_cast<uintptr_t>(from) % bytes)
    report(FAULT, "line %d: copies %u bytes from an address that is not a multiple of %u", line, bytes, bytes);
  if (inside) check_source(from, bytes, line);
  if (race_detection) record_access(current->number, to, bytes, COPY, IS_LINE | static_cast<uint32_t>(line));
  memset(to, POISON, bytes);
  append(current->copies, {to, from, bytes, inside, current->copies.group, line});
}

void commit_copies() { current->copies.group++; }

void emulator::await(unsigned int pending) {
  Copies &copies = current->copies;
  unsigned completed = 0;
  while (completed < copies.count && copies.pending[completed].group + pending < copies.group)
    complete_copy(copies.pending[completed++]);
  copies.count -= completed;
  memmove(copies.pending, copies.pending + completed, copies.count * sizeof(Copy));
}
