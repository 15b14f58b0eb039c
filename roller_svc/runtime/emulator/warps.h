// Warp collectives, and the rendezvous of the threads of a convergence group.
#pragma once
#include "fibers.h"

namespace {

// Enter a collective of the caller's warp or warpgroup. Reports a fault if other members are in a different one.
void enter(ConvergenceGroup &own, Fiber *const *waiting, const char *kind_name, const char *what, int line) {
  if (!own.arrived) {
    own.what = what;
    own.line = line;
  } else if (own.what != what || own.line != line) {
    report(FAULT, "warp divergence: the thread is in %s at line %d, thread %u of its %s in %s at line %d", what, line,
           waiting[0]->thread, kind_name, own.what, own.line);
  }
  if (own.ended)
    report(FAULT, "line %d: warp divergence: the thread is in %s, but %u of its %s's threads have ended", line, what,
           own.ended, kind_name);
  current->line = line;
}

// Wait for the other members. The last arrival does the work for all.
template <class Work> void rendezvous(ConvergenceGroup &own, Fiber **waiting, Work work) {
  if (own.arrived + 1 < own.members) {
    waiting[own.arrived++] = current;
    yield();
    return;
  }
  work();
  own.generation++;
  unsigned others = own.arrived;
  own.arrived = 0;
  shuffle(waiting, others);
  for (unsigned i = 0; i < others; i++)
    if (interleave_warps)
      run_last(waiting[i]);
    else
      run_first(waiting[others - 1 - i]);
}

// Enter a collective of the caller's warp. Returns the storage of its lanes' data.
Exchange &enter_collective(const char *what, int line) {
  Warp &own = *current->warp;
  enter(own, own.waiting, "warp", what, line);
  return own.exchanges[own.generation % 2];
}
template <class Work> void rendezvous(Work work) {
  Warp &own = *current->warp;
  rendezvous(own, own.waiting, [&own, work] { work(own.exchanges[own.generation % 2]); });
}

// Synchronise the warp before each lane acts by itself.
void rendezvous_warp(const char *what, int line) {
  enter_collective(what, line);
  rendezvous([](Exchange &) {});
}

unsigned first_of_warp() { return current->number - current->lane; }

void need_whole_mask(const char *what, unsigned mask, int width, int line) {
  if (mask != emulator::WHOLE_WARP || width != emulator::WARP)
    report(FAULT, "line %d: %s of mask %#x and width %d: the emulator knows whole warps only", line, what, mask, width);
}

void need_whole_warp(const char *what, int line) {
  if (current->warp->members < WARP)
    report(FAULT, "line %d: %s takes a whole warp, this one has %u threads", line, what, current->warp->members);
}

}  // namespace

unsigned int emulator::lane() { return current->lane; }

unsigned int emulator::lanes() { return current->warp->members; }

void emulator::sync_warp(unsigned int mask, int line) {
  need_whole_mask("__syncwarp", mask, WARP, line);
  enter_collective("__syncwarp", line);
  rendezvous([](Exchange &) { order_warp(first_of_warp(), current->warp->members); });
}

const emulator::Votes &emulator::exchanged(const char *what, unsigned int mask, int width, unsigned long long value,
                                           int line) {
  need_whole_mask(what, mask, width, line);
  Exchange &exchange = enter_collective(what, line);
  if (!current->warp->arrived) memset(&exchange.votes, POISON, sizeof exchange.votes);
  exchange.votes.of[current->lane] = value;
  rendezvous([](Exchange &) {});
  return exchange.votes;
}
