// Context switch between fibers: emulator_switch(save, load) and new stacks, for each architecture.
#pragma once
#include <stddef.h>
#include <string.h>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace {

constexpr size_t STACK_BYTES = 256 << 10;
constexpr unsigned MAX_CONTEXTS = 8192;  // fibers that can be saved

extern "C" void emulator_switch(void **save, void *load);
#if defined(__x86_64__)
asm(R"(
  .text
  .globl emulator_switch
  .type emulator_switch, @function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
void *new_stack(unsigned char *top, void (*entry)()) {
  void **sp = reinterpret_cast<void **>(top);
  *--sp = nullptr;  // no return address
  *--sp = reinterpret_cast<void *>(entry);
  for (int i = 0; i < 6; i++) *--sp = nullptr;
  return sp;
}
#elif defined(__aarch64__)
asm(R"(
  .text
  .globl emulator_switch
  .type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
void *new_stack(unsigned char *top, void (*entry)()) {
  void **sp = reinterpret_cast<void **>(top) - 20;
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<void *>(entry);  // x30
  return sp;
}
#else
// the slow way: a saved fiber is a ucontext_t of its own
ucontext_t contexts[MAX_CONTEXTS + 1];
int context_count;
void *new_stack(unsigned char *top, void (*entry)()) {
  ucontext_t *context = &contexts[context_count++];
  getcontext(context);
  context->uc_stack.ss_sp = top - STACK_BYTES;
  context->uc_stack.ss_size = STACK_BYTES;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
extern "C" void emulator_switch(void **save, void *load) {
  static ucontext_t outside;
  if (!*save) *save = &outside;
  swapcontext(static_cast<ucontext_t *>(*save), static_cast<ucontext_t *>(load));
}
#endif

}  // namespace
