// Collectives of a warp, and how threads that go on together meet in one.
#pragma once
#include "fibers.h"

namespace {

// The caller comes to a collective of its warp or warpgroup. All members must come to the same one.
void enter(Party &own, Fiber *const *waiting, const char *noun, const char *what, int line) {
  if (!own.arrived) {
    own.what = what;
    own.line = line;
  } else if (own.what != what || own.line != line) {
    report(FAULT, "warp divergence: the thread is in %s at line %d, thread %u of its %s in %s at line %d", what, line,
           waiting[0]->thread, noun, own.what, own.line);
  }
  if (own.ended)
    report(FAULT, "line %d: warp divergence: the thread is in %s, but %u of its %s's threads have ended", line, what,
           own.ended, noun);
  current->line = line;
}

// Waits for the other members; whoever comes last does the work of all.
template <class Work> void meet(Party &own, Fiber **waiting, Work work) {
  if (own.arrived + 1 < own.members) {
    waiting[own.arrived++] = current;
    leave();
    return;
  }
  work();
  own.generation++;
  unsigned others = own.arrived;
  own.arrived = 0;
  shuffle(waiting, others);
  for (unsigned i = 0; i < others; i++)
    if (warps_take_turns)
      run_last(waiting[i]);
    else
      run_first(waiting[others - 1 - i]);
}

// The same for the caller's warp, with where its lanes' data goes.
Exchange &entered(const char *what, int line) {
  Warp &own = *current->warp;
  enter(own, own.waiting, "warp", what, line);
  return own.exchanges[own.generation % 2];
}
template <class Work> void meet(Work work) {
  Warp &own = *current->warp;
  meet(own, own.waiting, [&own, work] { work(own.exchanges[own.generation % 2]); });
}

// What the whole warp is to come to, and each lane then does by itself.
void meet_warp(const char *what, int line) {
  entered(what, line);
  meet([](Exchange &) {});
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
  entered("__syncwarp", line);
  meet([](Exchange &) { order_warp(first_of_warp(), current->warp->members); });
}

const emulator::Votes &emulator::exchanged(const char *what, unsigned int mask, int width, unsigned long long value,
                                           int line) {
  need_whole_mask(what, mask, width, line);
  Exchange &exchange = entered(what, line);
  if (!current->warp->arrived) memset(&exchange.votes, POISON, sizeof exchange.votes);
  exchange.votes.of[current->lane] = value;
  meet([](Exchange &) {});
  return exchange.votes;
}
