// Buffers between guard pages, and shared memory of blocks.
#pragma once
#include "report.h"

#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

namespace {

using emulator::Buffer;

constexpr unsigned char POISON = 0xff;
constexpr size_t PAGE = 65536;  // the largest page of the machines in question
constexpr size_t ALIGNMENT = 16;  // of buffers; the redzone behind one is smaller and checked after a launch

struct Region {
  const Buffer *buffer;
  unsigned char *start, *end;  // the whole mapping, with guard pages
  unsigned char *data;
};
Region *regions;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

unsigned char *mapped(size_t bytes) {
  void *at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) failed("mmap");
  return static_cast<unsigned char *>(at);
}

void allow(unsigned char *at, size_t bytes, int how) {
  if (mprotect(at, bytes, how)) failed("mprotect");
}

// The buffer at the end of its pages (an even seed) or at their start, poisoned with the slack around it.
Region guarded(const Buffer &buffer, unsigned seed) {
  size_t inside = rounded(buffer.bytes, PAGE);
  unsigned char *start = mapped(inside + 2 * PAGE);
  allow(start + PAGE, inside, PROT_READ | PROT_WRITE);
  memset(start + PAGE, POISON, inside);
  size_t shift = seed % 2 ? 0 : inside - rounded(buffer.bytes, ALIGNMENT);
  return {&buffer, start, start + inside + 2 * PAGE, start + PAGE + shift};
}

bool poisoned(const unsigned char *from, const unsigned char *to) {
  while (from < to && *from == POISON) from++;
  return from == to;
}

void check_slack() {
  const auto &program = emulator_program;
  for (int i = 0; i < program.buffer_count; i++) {
    const Region &r = regions[i];
    const Buffer &buffer = *r.buffer;
    if (!poisoned(r.start + PAGE, r.data)) report(FAULT, "the launch wrote before the first byte of %s", buffer.name);
    if (!poisoned(r.data + buffer.bytes, r.end - PAGE))
      report(FAULT, "the launch wrote behind the last byte of %s, which has %lu bytes", buffer.name, buffer.bytes);
  }
}

struct Span {
  unsigned char *at;
  size_t bytes;
} shared;  // the program's thread-local segment, which is all shared memory of its kernels

// Blocks that run together: one, or those of a cluster, of which 8 are portable (CUDA programming guide, "Thread Block
// Clusters"). One alone has the segment itself; those of a cluster have memory as long, as far from multiples of PAGE.
constexpr unsigned MAX_BLOCKS = 8;
unsigned char *shared_of[MAX_BLOCKS];
unsigned block_count, running;  // blocks that run together, and the rank of the one whose thread runs
unsigned threads;               // of a block

// Allow or forbid access to the shared memory of a block of a cluster, which lies between guard pages.
void open_shared(unsigned rank, bool open) {
  size_t shift = reinterpret_cast<uintptr_t>(shared.at) % PAGE;
  allow(shared_of[rank] - shift, rounded(shift + shared.bytes, PAGE), open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void assign_shared() {
  static unsigned char *own[MAX_BLOCKS];
  shared_of[0] = shared.at;
  for (unsigned rank = 0; block_count > 1 && rank < block_count; rank++) {
    size_t shift = reinterpret_cast<uintptr_t>(shared.at) % PAGE;
    if (!own[rank]) own[rank] = mapped(rounded(shift + shared.bytes, PAGE) + 2 * PAGE) + PAGE + shift;
    shared_of[rank] = own[rank];
    open_shared(rank, true);
  }
}

int find_shared(dl_phdr_info *info, size_t, void *) {
  for (int i = 0; i < info->dlpi_phnum; i++)
    if (info->dlpi_phdr[i].p_type == PT_TLS)
      shared = {static_cast<unsigned char *>(info->dlpi_tls_data), info->dlpi_phdr[i].p_memsz};
  return 1;  // the program itself comes first
}

// Return the block whose shared memory contains the address; MAX_BLOCKS if none does.
unsigned block_with(const void *address) {
  auto *at = static_cast<const unsigned char *>(address);
  for (unsigned rank = 0; rank < block_count; rank++)
    if (at >= shared_of[rank] && at < shared_of[rank] + shared.bytes) return rank;
  return MAX_BLOCKS;
}

unsigned char *dynamic_of(unsigned rank) { return shared_of[rank] + (launch->dynamic() - shared.at); }

// Whether these bytes belong to the running block: static arrays, or the dynamic bytes of the launch.
bool in_shared(const void *from, size_t bytes) {
  auto *at = static_cast<const unsigned char *>(from);
  if (at < shared_of[running] || at + bytes > shared_of[running] + shared.bytes) return false;
  if (!launch->dynamic) return true;
  const unsigned char *start = dynamic_of(running);
  if (at + bytes <= start + launch->dynamic_bytes) return true;
  return at >= start + emulator_program.dynamic_bytes + emulator::DYNAMIC_SLACK_BYTES;
}

// Shared-memory addresses of instructions; the segment starts at a multiple of its largest alignment.
constexpr size_t SHARED_ALIGNMENT = 1024;
size_t shared_offset(const void *address, unsigned rank) {
  size_t before = reinterpret_cast<uintptr_t>(shared.at) % SHARED_ALIGNMENT;
  return static_cast<const unsigned char *>(address) - shared_of[rank] + before;
}
unsigned char *shared_at(size_t offset, unsigned rank) {
  return shared_of[rank] + offset - reinterpret_cast<uintptr_t>(shared.at) % SHARED_ALIGNMENT;
}

// Return the buffer that contains the address, guard pages included; null if none does.
const Region *region_of(const void *address) {
  auto *at = static_cast<const unsigned char *>(address);
  for (int i = 0; regions && i < emulator_program.buffer_count; i++)
    if (at >= regions[i].start && at < regions[i].end) return &regions[i];
  return nullptr;
}

}  // namespace
