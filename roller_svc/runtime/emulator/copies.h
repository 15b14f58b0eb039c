// cp.async: data lands when its thread awaits it, never earlier; until then the destination is poison.
#pragma once
#include "warps.h"

namespace {

void land(const Copy &copy) {
  if (races_watched) {
    uint32_t where = IS_LINE | static_cast<uint32_t>(copy.line);
    if (copy.inside) watch(current->number, copy.from, copy.bytes, READ, where);
    watch_landing(current->number, copy.to, copy.bytes, where);
  }
  if (copy.inside)
    memcpy(copy.to, copy.from, copy.bytes);
  else
    memset(copy.to, 0, copy.bytes);
}

void append(Copies &copies, const Copy &copy) {
  if (copies.count == copies.room) {
    copies.room = copies.room ? 2 * copies.room : 32;
    copies.pending = static_cast<Copy *>(realloc(copies.pending, copies.room * sizeof(Copy)));
    if (!copies.pending) failed("realloc");
  }
  copies.pending[copies.count++] = copy;
}

// Whether all bytes are a buffer's own, and not the slack behind it.
void check_source(const unsigned char *from, unsigned bytes, int line) {
  const Region *region = region_of(from);
  if (!region) report(FAULT, "line %d: copies from an address in no buffer", line);
  if (from < region->data || from + bytes > region->data + region->buffer->bytes)
    report(FAULT, "line %d: copies %u bytes at byte %td of %s, which has %lu bytes", line, bytes, from - region->data,
           region->buffer->name, region->buffer->bytes);
}

}  // namespace

void emulator::copy(void *shared, unsigned long room, const void *memory, unsigned int bytes, bool inside, int line) {
  auto *to = static_cast<unsigned char *>(shared);
  auto *from = static_cast<const unsigned char *>(memory);
  if (!in_shared(to, bytes)) report(FAULT, "line %d: copies to an address outside the block's shared memory", line);
  if (room < bytes) report(FAULT, "line %d: copies %u bytes beyond the end of a shared array", line, bytes);
  if (reinterpret_cast<uintptr_t>(to) % bytes)
    report(FAULT, "line %d: copies %u bytes to a shared address that is no multiple of %u", line, bytes, bytes);
  if (inside && reinterpret_cast<uintptr_t>(from) % bytes)
    report(FAULT, "line %d: copies %u bytes from an address that is no multiple of %u", line, bytes, bytes);
  if (inside) check_source(from, bytes, line);
  if (races_watched) watch(current->number, to, bytes, COPY, IS_LINE | static_cast<uint32_t>(line));
  memset(to, POISON, bytes);
  append(current->copies, {to, from, bytes, inside, current->copies.group, line});
}

void commit_copies() { current->copies.group++; }

void emulator::await(unsigned int pending) {
  Copies &copies = current->copies;
  unsigned landed = 0;
  while (landed < copies.count && copies.pending[landed].group + pending < copies.group)
    land(copies.pending[landed++]);
  copies.count -= landed;
  memmove(copies.pending, copies.pending + landed, copies.count * sizeof(Copy));
}
