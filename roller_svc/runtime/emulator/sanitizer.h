// Hooks of -fsanitize=thread, for race detection: the compiler inserts a call before every access to memory that other
// threads might see, and replaces atomic operations by calls.
#pragma once
#include "fibers.h"

namespace {

[[gnu::always_inline]] inline void record_access_here(const void *address, size_t bytes, Kind kind, void *code) {
  auto *at = static_cast<const unsigned char *>(address);
  if (at >= current->stack && at < current->stack + PAGE + STACK_BYTES) return;
  record_access(current->number, address, bytes, kind, static_cast<uint32_t>(reinterpret_cast<uintptr_t>(code)));
}

}  // namespace

extern "C" {
void __tsan_init() { race_detection = true; }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_read_range(void *at, size_t bytes) { record_access_here(at, bytes, READ, __builtin_return_address(0)); }
void __tsan_write_range(void *at, size_t bytes) { record_access_here(at, bytes, WRITE, __builtin_return_address(0)); }
void __tsan_atomic_thread_fence(int) {}

#define EMULATOR_ACCESS(bytes) \
  void __tsan_read##bytes(void *at) { record_access_here(at, bytes, READ, __builtin_return_address(0)); } \
  void __tsan_write##bytes(void *at) { record_access_here(at, bytes, WRITE, __builtin_return_address(0)); } \
  void __tsan_unaligned_read##bytes(void *at) { record_access_here(at, bytes, READ, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##bytes(void *at) { record_access_here(at, bytes, WRITE, __builtin_return_address(0)); }
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4)
EMULATOR_ACCESS(8)
EMULATOR_ACCESS(16)

// ld.volatile is as strong as a relaxed load (PTX ISA, "Memory Consistency Model"): it does not race with atomics.
#define EMULATOR_VOLATILE(bytes) \
  void __tsan_volatile_read##bytes(void *at) { \
    record_access_here(at, bytes, ATOMIC_READ, __builtin_return_address(0)); \
  } \
  void __tsan_volatile_write##bytes(void *at) { \
    record_access_here(at, bytes, ATOMIC_WRITE, __builtin_return_address(0)); \
  }
EMULATOR_VOLATILE(1)
EMULATOR_VOLATILE(2)
EMULATOR_VOLATILE(4)
EMULATOR_VOLATILE(8)

// Fibers switch only where they wait, so plain operations are atomic.
#define EMULATOR_ATOMICS(bits, type) \
  type __tsan_atomic##bits##_load(const volatile type *at, int) { \
    record_access_here(const_cast<type *>(at), sizeof *at, ATOMIC_READ, __builtin_return_address(0)); \
    return *at; \
  } \
  void __tsan_atomic##bits##_store(volatile type *at, type value, int) { \
    record_access_here(const_cast<type *>(at), sizeof *at, ATOMIC_WRITE, __builtin_return_address(0)); \
    *at = value; \
  } \
  type __tsan_atomic##bits##_fetch_add(volatile type *at, type value, int) { \
    record_access_here(const_cast<type *>(at), sizeof *at, ATOMIC_WRITE, __builtin_return_address(0)); \
    type before = *at; \
    *at = before + value; \
    return before; \
  } \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type *at, type *expected, type value, int, int) { \
    record_access_here(const_cast<type *>(at), sizeof *at, ATOMIC_WRITE, __builtin_return_address(0)); \
    type before = *at; \
    bool same = before == *expected; \
    if (same) *at = value; \
    *expected = before; \
    return same; \
  }
EMULATOR_ATOMICS(16, uint16_t)
EMULATOR_ATOMICS(32, uint32_t)
EMULATOR_ATOMICS(64, uint64_t)
}
