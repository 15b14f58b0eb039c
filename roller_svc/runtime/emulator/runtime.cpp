// Runs a translated kernel: blocks or clusters one after another, with one fiber for each thread that waits.
//
//   program SEED ARENA_FD MEMORY_BYTES CPU_SECONDS
//
// The arena holds inputs, then outputs, each at a multiple of 64 bytes. Every buffer of the kernel lies between guard
// pages. Uninitialised memory (outputs, workspaces, shared memory) is 0xff bytes, a NaN of every floating type.
// Exit status: 0 done, 3 a fault of the kernel, 5 an index from data is out of range, 4 the run itself failed. The
// message is on stderr.
#include "copies.h"
#include "deadlocks.h"
#include "mfma.h"
#include "sanitizer.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

namespace {

constexpr size_t ARENA_ALIGNMENT = 64;

void run_launch(unsigned seed) {
  for (const int *i = launch->zeroed; *i >= 0; i++) memset(regions[*i].data, 0, regions[*i].buffer->bytes);
  order_launch();
  gridDim = launch->grid;
  blockDim = launch->block;
  unsigned long size = 1ul * blockDim.x * blockDim.y * blockDim.z;
  if (!size || size > MAX_THREADS) failed("a block of that many threads");
  threads = static_cast<unsigned>(size);
  uint64_t all_blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
  if (launch->cooperative && all_blocks > MAX_BLOCKS) failed("a cooperative launch of that many blocks");
  block_count = launch->cooperative ? static_cast<unsigned>(all_blocks) : launch->cluster;
  if (!block_count || block_count > MAX_BLOCKS || gridDim.x % launch->cluster) failed("a cluster of that many blocks");
  uint64_t clusters = all_blocks / block_count;
  for (uint64_t i = 0; i < clusters; i++) {
    begin_clustered(block_count * (seed % 2 ? clusters - 1 - i : i));
    run_threads();
  }
  check_slack();
}

// faults --------------------------------------------------------------------------------------------------------------

void on_signal(int number, siginfo_t *info, void *) {
  auto *at = static_cast<unsigned char *>(info->si_addr);
  if (number == SIGXCPU) report(FAILED, "out of CPU time");
  if (number != SIGSEGV && number != SIGBUS) report(FAULT, "signal %d (%s)", number, strsignal(number));
  if (const Region *region = region_of(at)) {
    const Buffer &buffer = *region->buffer;
    bool inside = at >= region->data && at < region->data + buffer.bytes;
    const char *why = buffer.role == emulator::INPUT && inside ? ": an input is written" : "";
    report(FAULT, "touches byte %td of %s, which has %lu bytes%s", at - region->data, buffer.name, buffer.bytes, why);
  }
  if (unsigned rank = block_with(at); rank < MAX_BLOCKS)
    report(FAULT, "touches shared memory of the cluster's block %u, which has ended", rank);
  for (const Fiber &fiber : fibers)
    if (fiber.stack && at >= fiber.stack && at < fiber.stack + PAGE) report(FAULT, "too much local memory");
  report(FAULT, "touches address %p, which is in no buffer", info->si_addr);
}

void handle_signals() {
  static unsigned char stack[64 << 10];
  stack_t alternate = {};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGXCPU};
  for (int number : signals) sigaction(number, &action, nullptr);
}

void limit(int kind, rlim_t value) {
  rlimit now;
  if (getrlimit(static_cast<__rlimit_resource>(kind), &now)) failed("getrlimit");
  if (now.rlim_max != RLIM_INFINITY && now.rlim_max < value) value = now.rlim_max;
  now = {value, now.rlim_max};
  if (setrlimit(static_cast<__rlimit_resource>(kind), &now)) failed("setrlimit");
}

}  // namespace

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

extern "C" void __ubsan_handle_type_mismatch_v1_abort(const Site *site, uintptr_t pointer) {
  const char *what = pointer ? "a pointer that is not aligned as its type needs" : "a null pointer";
  report(FAULT, "line %u, column %u: %s", site->line, site->column, what);
}

int main(int count, char **words) {
  if (count != 5) failed("reading the command line");
  auto seed = static_cast<unsigned>(strtoul(words[1], nullptr, 10));
  int arena_fd = atoi(words[2]);
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_FSIZE, 0);
  limit(RLIMIT_AS, strtoull(words[3], nullptr, 10));
  limit(RLIMIT_CPU, strtoull(words[4], nullptr, 10));
  handle_signals();
  dl_iterate_phdr(find_shared, nullptr);

  const auto &program = emulator_program;
  size_t bytes = 0;
  for (int i = 0; i < program.buffer_count; i++)
    if (program.buffers[i].role != emulator::WORKSPACE) bytes += rounded(program.buffers[i].bytes, ARENA_ALIGNMENT);
  struct stat file;
  if (fstat(arena_fd, &file) || static_cast<size_t>(file.st_size) != bytes) failed("finding the arena");
  auto *arena = static_cast<unsigned char *>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena_fd, 0));
  if (arena == MAP_FAILED) failed("mapping the arena");

  auto *all = static_cast<Region *>(calloc(program.buffer_count, sizeof(Region)));
  unsigned char *at = arena;
  for (int i = 0; i < program.buffer_count; i++) {
    const Buffer &buffer = program.buffers[i];
    all[i] = guarded(buffer, seed);
    arguments[i] = all[i].data;
    if (buffer.role == emulator::INPUT || buffer.role == emulator::UPDATED) memcpy(all[i].data, at, buffer.bytes);
    if (buffer.role == emulator::INPUT) {
      allow(all[i].start + PAGE, all[i].end - all[i].start - 2 * PAGE, PROT_READ);
    }
    if (buffer.role != emulator::WORKSPACE) at += rounded(buffer.bytes, ARENA_ALIGNMENT);
  }
  regions = all;

  for (unsigned i = 0; i < MAX_FIBERS; i++) idle[i] = &fibers[MAX_FIBERS - 1 - i];
  idle_count = MAX_FIBERS;
  interleave_warps = seed % 2;
  random_state = seed ? seed * 0x9e3779b97f4a7c15u + 1 : 0;
  for (int i = 0; i < program.launch_count; i++) {
    launch = &program.launches[i];
    run_launch(seed);
  }

  at = arena;
  for (int i = 0; i < program.buffer_count; i++) {
    const Buffer &buffer = program.buffers[i];
    if (buffer.role == emulator::OUTPUT || buffer.role == emulator::UPDATED) memcpy(at, regions[i].data, buffer.bytes);
    if (buffer.role != emulator::WORKSPACE) at += rounded(buffer.bytes, ARENA_ALIGNMENT);
  }
  return 0;
}
