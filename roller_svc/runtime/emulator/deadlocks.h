// Deadlock report: what the live threads wait for.
#pragma once
#include "clusters.h"

namespace {

unsigned length(const Waiters &waiters) {
  unsigned count = 0;
  for (const Fiber *fiber = waiters.first; fiber; fiber = fiber->next) count++;
  return count;
}

// Return a description of a collective that only a part of a warp or warpgroup has reached; null if there is none.
const char *find_divergence() {
  static char text[160];
  const auto found = [](const ConvergenceGroup &group, const char *kind_name, unsigned number) {
    snprintf(text, sizeof text, "%u of %u threads of %s %u wait in %s at line %d", group.arrived, group.members,
             kind_name, number, group.what, group.line);
    return group.arrived != 0;
  };
  for (unsigned rank = 0; rank < block_count; rank++) {
    for (unsigned i = 0; i * WARP < threads; i++)
      if (found(blocks[rank].warps[i], "warp", i)) return text;
    for (unsigned i = 0; i * WARPGROUP < threads; i++)
      if (found(warpgroups[rank][i], "warpgroup", i)) return text;
  }
  return nullptr;
}

void report_phases() {
  for (unsigned i = 0; i < phased_count; i++) {
    const Phased &barrier = phased[i];
    if (!barrier.waiters.first) continue;
    const Fiber &fiber = *barrier.waiters.first;
    const char *others = find_divergence();
    load_position(&fiber);
    report(FAULT, "a deadlock: line %d waits for phase %u of the barrier at shared byte %zu, initialised at line %d, "
           "which lacks %u of %u arrivals and %ld bytes; %u threads wait for it%s%s", fiber.line, barrier.phase,
           barrier.offset, barrier.line, barrier.pending, barrier.count, barrier.bytes, length(barrier.waiters),
           others ? ", and " : "", others ? others : "");
  }
}

void report_others(const Block &block) {
  if (const Fiber *fiber = register_waiters[block.rank].first)
    report(FAULT, "a deadlock: line %d waits for registers: %u threads of %u have all but %u", fiber->line,
           length(register_waiters[block.rank]), threads, free_registers[block.rank]);
  for (unsigned id = 1; id < MAX_NAMED; id++)
    if (const Named &one = named[block.rank][id]; one.arrived)
      report(FAULT, "a deadlock: %u threads wait in named barrier %u at line %d, which is for %u", one.arrived, id,
             one.line, one.count);
}

[[noreturn]] void report_deadlock() {
  report_events();
  report_phases();
  if (const char *others = find_divergence())
    report(FAULT, "warp divergence: %s, the others in a barrier", others);
  for (unsigned rank = 0; rank < block_count; rank++) report_others(blocks[rank]);
  for (unsigned rank = 0; rank < block_count; rank++)
    if (const Block &block = blocks[rank]; block.waiting_count)
      report(FAULT, "barrier divergence: %u of %u threads wait at line %d, the others have ended%s: a deadlock",
             block.waiting_count, threads, block.waiting[0]->line, cluster_arrived ? " or wait for the cluster" : "");
  report(FAULT, "a deadlock: %u threads of %u wait for the cluster at line %d", cluster_arrived, all_threads(),
         cluster_waiters.first->line);
}

}  // namespace
