// Runs a translated kernel: blocks one after another, one fiber for each thread that waits, everything watched.
//
//   program SEED ARENA_FD MEMORY_BYTES CPU_SECONDS
//
// The arena holds inputs, then outputs, each at a multiple of 64 bytes. Every buffer of the kernel lies between two pages
// that nobody may touch; what a kernel should not read before writing (outputs, workspaces, shared memory) is 0xff bytes, a
// NaN of every floating type. Exit status: 0 done, 3 the kernel did wrong, 5 an index that came from data was out of
// range, 4 the run itself failed; what happened is on stderr.
#include "emulator.h"

#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

using emulator::Buffer;
using emulator::Launch;

constexpr int FAULT = 3, FAILED = 4, OUT_OF_RANGE = 5;
constexpr unsigned char POISON = 0xff;
constexpr size_t PAGE = 65536;  // the largest page of the machines in question
constexpr size_t ALIGNMENT = 16;  // of buffers; the slack behind one is less than that and watched
constexpr size_t ARENA_ALIGNMENT = 64;
constexpr size_t STACK_BYTES = 256 << 10;
constexpr int MOST_THREADS = 1024;

const Launch *launch;  // the one that runs

// reports --------------------------------------------------------------------------------------------------------------

[[noreturn]] void report(int status, const char *format, ...) {
  fprintf(stderr, "%s", launch ? launch->name : "setting up");
  if (launch)
    fprintf(stderr, ", block (%u, %u, %u), thread (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
            threadIdx.y, threadIdx.z);
  fprintf(stderr, ": ");
  va_list rest;
  va_start(rest, format);
  vfprintf(stderr, format, rest);
  va_end(rest);
  fprintf(stderr, "\n");
  fflush(stderr);
  _exit(status);
}

[[noreturn]] void failed(const char *what) { report(FAILED, "%s failed", what); }

// memory ---------------------------------------------------------------------------------------------------------------

struct Region {
  const Buffer *buffer;
  unsigned char *start, *end;  // all that was mapped, forbidden pages too
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
    if (!poisoned(r.start + PAGE, r.data)) report(FAULT, "the launch wrote before the first byte of %s", r.buffer->name);
    if (!poisoned(r.data + r.buffer->bytes, r.end - PAGE))
      report(FAULT, "the launch wrote behind the last byte of %s, which has %lu bytes", r.buffer->name, r.buffer->bytes);
  }
}

struct Span {
  unsigned char *at;
  size_t bytes;
} shared;  // the program's thread-local segment, which is all shared memory of its kernels

int find_shared(dl_phdr_info *info, size_t, void *) {
  for (int i = 0; i < info->dlpi_phnum; i++)
    if (info->dlpi_phdr[i].p_type == PT_TLS)
      shared = {static_cast<unsigned char *>(info->dlpi_tls_data), info->dlpi_phdr[i].p_memsz};
  return 1;  // the program itself comes first
}

// fibers ---------------------------------------------------------------------------------------------------------------

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
void *fresh(unsigned char *top, void (*entry)()) {
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
void *fresh(unsigned char *top, void (*entry)()) {
  void **sp = reinterpret_cast<void **>(top) - 20;
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<void *>(entry);  // x30
  return sp;
}
#else
// the slow way: a saved fiber is a ucontext_t of its own
ucontext_t contexts[MOST_THREADS + 1];
int context_count;
void *fresh(unsigned char *top, void (*entry)()) {
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

struct Fiber {
  void *sp;
  unsigned char *stack;  // null until the fiber is first needed
  unsigned thread;
  int line;  // of the barrier where it waits
};

Fiber fibers[MOST_THREADS];
Fiber *idle[MOST_THREADS], *waiting[MOST_THREADS], *ready[MOST_THREADS];
unsigned idle_count, waiting_count, ready_count;
unsigned order[MOST_THREADS];  // in which the threads of the block start
unsigned threads, started, finished;
Fiber *current;
void *outside;  // the stack that the blocks are started from
void *arguments[4096];
uint64_t random_state;

unsigned random_below(unsigned limit) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>((random_state >> 33) % limit);
}

// Seed 0 leaves everything in order.
template <class T> void shuffle(T *items, unsigned count) {
  if (!random_state) return;
  for (unsigned i = count; i > 1; i--) {
    unsigned j = random_below(i);
    T kept = items[i - 1];
    items[i - 1] = items[j];
    items[j] = kept;
  }
}

void place(unsigned thread) {
  threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
}

void lead();

// Whoever runs next; null when the block is done. Threads that all others wait for cannot come: then the barrier is
// complete, or they never will.
Fiber *next() {
  if (ready_count) {
    Fiber *fiber = ready[--ready_count];
    place(fiber->thread);
    return fiber;
  }
  if (started < threads) {
    Fiber *fiber = idle[--idle_count];
    if (!fiber->stack) {
      fiber->stack = mapped(STACK_BYTES + PAGE);  // the lowest page stays forbidden
      allow(fiber->stack + PAGE, STACK_BYTES, PROT_READ | PROT_WRITE);
      fiber->sp = fresh(fiber->stack + PAGE + STACK_BYTES, lead);
    }
    return fiber;
  }
  if (!waiting_count) return nullptr;
  int line = waiting[0]->line;
  for (unsigned i = 1; i < waiting_count; i++) {
    if (waiting[i]->line == line) continue;
    report(FAULT, "barrier divergence: thread %u waits at line %d, thread %u at line %d", waiting[0]->thread, line,
           waiting[i]->thread, waiting[i]->line);
  }
  if (finished)
    report(FAULT, "barrier divergence: %u of %u threads wait at line %d, the others have ended: a deadlock",
           waiting_count, threads, line);
  shuffle(waiting, waiting_count);
  for (unsigned i = 0; i < waiting_count; i++) ready[i] = waiting[waiting_count - 1 - i];
  ready_count = waiting_count;
  waiting_count = 0;
  return next();
}

void leave() {
  Fiber *self = current, *to = next();
  if (to == self) return;
  current = to;
  emulator_switch(&self->sp, to ? to->sp : outside);
}

// A fiber's life: it runs thread after thread, and waits idle while there is none.
void lead() {
  for (;;) {
    while (started < threads) {
      current->thread = order[started++];
      place(current->thread);
      launch->run(arguments);
      finished++;
    }
    idle[idle_count++] = current;
    leave();
  }
}

void run_block() {
  memset(shared.at, POISON, shared.bytes);
  started = finished = 0;
  for (unsigned i = 0; i < threads; i++) order[i] = i;
  shuffle(order, threads);
  current = next();
  emulator_switch(&outside, current->sp);
  if (!launch->dynamic) return;
  const unsigned char *end = launch->dynamic() + launch->dynamic_bytes;
  if (!poisoned(end, end + emulator::DYNAMIC_SLACK_BYTES))
    report(FAULT, "the block wrote behind dynamic shared memory, of which the launch asked for %lu bytes",
           launch->dynamic_bytes);
}

void run_launch(unsigned seed) {
  for (const int *i = launch->zeroed; *i >= 0; i++) memset(regions[*i].data, 0, regions[*i].buffer->bytes);
  gridDim = launch->grid;
  blockDim = launch->block;
  threads = blockDim.x * blockDim.y * blockDim.z;
  if (!threads || threads > MOST_THREADS) failed("a block of that many threads");
  uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
  for (uint64_t i = 0; i < blocks; i++) {
    uint64_t b = seed % 2 ? blocks - 1 - i : i;
    blockIdx = {unsigned(b % gridDim.x), unsigned(b / gridDim.x % gridDim.y), unsigned(b / gridDim.x / gridDim.y)};
    run_block();
  }
  check_slack();
}

// faults ---------------------------------------------------------------------------------------------------------------

void on_signal(int number, siginfo_t *info, void *) {
  auto *at = static_cast<unsigned char *>(info->si_addr);
  if (number == SIGXCPU) report(FAILED, "out of CPU time");
  if (number != SIGSEGV && number != SIGBUS) report(FAULT, "signal %d (%s)", number, strsignal(number));
  for (int i = 0; regions && i < emulator_program.buffer_count; i++) {
    const Region &r = regions[i];
    if (at < r.start || at >= r.end) continue;
    const char *why = r.buffer->role == emulator::INPUT && at >= r.data && at < r.data + r.buffer->bytes
                          ? ": an input is written"
                          : "";
    report(FAULT, "touches byte %td of %s, which has %lu bytes%s", at - r.data, r.buffer->name, r.buffer->bytes, why);
  }
  for (const Fiber &fiber : fibers)
    if (fiber.stack && at >= fiber.stack && at < fiber.stack + PAGE) report(FAULT, "too much local memory");
  report(FAULT, "touches address %p, which is in no buffer", info->si_addr);
}

void watch_signals() {
  static unsigned char stack[64 << 10];
  stack_t alternate = {};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int watched[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGXCPU};
  for (int number : watched) sigaction(number, &action, nullptr);
}

void limit(int kind, rlim_t value) {
  rlimit now;
  if (getrlimit(static_cast<__rlimit_resource>(kind), &now)) failed("getrlimit");
  if (now.rlim_max != RLIM_INFINITY && now.rlim_max < value) value = now.rlim_max;
  now = {value, now.rlim_max};
  if (setrlimit(static_cast<__rlimit_resource>(kind), &now)) failed("setrlimit");
}

}  // namespace

void emulator::barrier(int line) {
  current->line = line;
  waiting[waiting_count++] = current;
  leave();
}

void emulator::out_of_range(long long index, int check) {
  fprintf(stderr, "%d %lld\n", check, index);
  fflush(stderr);
  _exit(OUT_OF_RANGE);
}

// Called by the compiler's own checks (-fsanitize), each with a record that starts with the place in the text.
struct Site {
  const char *file;
  uint32_t line, column;
};
#define EMULATOR_CHECK(name, what) \
  extern "C" void __ubsan_handle_##name##_abort(const Site *site) { \
    report(FAULT, "line %u, column %u: " what, site->line, site->column); \
  }
EMULATOR_CHECK(out_of_bounds, "an index leaves its local or shared array")
EMULATOR_CHECK(add_overflow, "signed addition overflows")
EMULATOR_CHECK(sub_overflow, "signed subtraction overflows")
EMULATOR_CHECK(mul_overflow, "signed multiplication overflows")
EMULATOR_CHECK(negate_overflow, "signed negation overflows")
EMULATOR_CHECK(divrem_overflow, "integer division by zero, or one that overflows")
EMULATOR_CHECK(shift_out_of_bounds, "a shift by a negative amount or by as many bits as there are")
EMULATOR_CHECK(type_mismatch_v1, "a pointer that is null or not aligned as its type needs")

int main(int count, char **words) {
  if (count != 5) failed("reading the command line");
  auto seed = static_cast<unsigned>(strtoul(words[1], nullptr, 10));
  int arena_fd = atoi(words[2]);
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_FSIZE, 0);
  limit(RLIMIT_AS, strtoull(words[3], nullptr, 10));
  limit(RLIMIT_CPU, strtoull(words[4], nullptr, 10));
  watch_signals();
  dl_iterate_phdr(find_shared, nullptr);

  const auto &program = emulator_program;
  size_t bytes = 0;
  for (int i = 0; i < program.buffer_count; i++)
    if (program.buffers[i].role != emulator::WORKSPACE) bytes += rounded(program.buffers[i].bytes, ARENA_ALIGNMENT);
  struct stat file;
  if (fstat(arena_fd, &file) || static_cast<size_t>(file.st_size) != bytes) failed("finding an arena of the right size");
  auto *arena = static_cast<unsigned char *>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena_fd, 0));
  if (arena == MAP_FAILED) failed("mapping the arena");

  auto *all = static_cast<Region *>(calloc(program.buffer_count, sizeof(Region)));
  unsigned char *at = arena;
  for (int i = 0; i < program.buffer_count; i++) {
    const Buffer &buffer = program.buffers[i];
    all[i] = guarded(buffer, seed);
    arguments[i] = all[i].data;
    if (buffer.role == emulator::INPUT) {
      memcpy(all[i].data, at, buffer.bytes);
      allow(all[i].start + PAGE, all[i].end - all[i].start - 2 * PAGE, PROT_READ);
    }
    if (buffer.role != emulator::WORKSPACE) at += rounded(buffer.bytes, ARENA_ALIGNMENT);
  }
  regions = all;

  for (unsigned i = 0; i < MOST_THREADS; i++) idle[i] = &fibers[MOST_THREADS - 1 - i];
  idle_count = MOST_THREADS;
  random_state = seed ? seed * 0x9e3779b97f4a7c15u + 1 : 0;
  for (int i = 0; i < program.launch_count; i++) {
    launch = &program.launches[i];
    run_launch(seed);
  }

  at = arena;
  for (int i = 0; i < program.buffer_count; i++) {
    const Buffer &buffer = program.buffers[i];
    if (buffer.role == emulator::OUTPUT) memcpy(at, regions[i].data, buffer.bytes);
    if (buffer.role != emulator::WORKSPACE) at += rounded(buffer.bytes, ARENA_ALIGNMENT);
  }
  return 0;
}
