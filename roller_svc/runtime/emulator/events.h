// Events of a cooperative launch: counters in device memory at which tasks arrive and for which others wait.
//
// An arrival releases what its thread knows, a wait acquires what all arrivals released (PTX ISA, "Release and Acquire
// Patterns": atomics on one word continue the release sequence). Relaxed arrivals release nothing, relaxed waits acquire
// nothing; kernels do not have them, but mutants do.
#pragma once
#include "barriers.h"

namespace {

constexpr unsigned MAX_EVENTS = 4096;

struct Event {
  const unsigned *word;
  Waiters waiters;
  Clock released;
};

// What a thread waits for, for the report of a deadlock.
struct EventWait {
  unsigned row, event, target;
};

Event events[MAX_EVENTS];
unsigned event_count;
EventWait event_waits[MAX_FIBERS];

void begin_events() {
  for (unsigned i = 0; i < event_count; i++) free(events[i].released);
  event_count = 0;
}

Event &event_of(const unsigned *word, int line) {
  for (unsigned i = 0; i < event_count; i++)
    if (events[i].word == word) return events[i];
  const Region *region = region_of(word);
  const auto *at = reinterpret_cast<const unsigned char *>(word);
  if (!region || at < region->data || at + sizeof *word > region->data + region->buffer->bytes)
    report(FAULT, "line %d: an event that is in no buffer", line);
  if (event_count == MAX_EVENTS) failed("events: that many");
  events[event_count] = {word, {}, nullptr};
  return events[event_count++];
}

void report_events() {
  for (unsigned i = 0; i < event_count; i++)
    if (const Fiber *fiber = events[i].waiters.first) {
      const EventWait &wait = event_waits[fiber->number];
      report(FAULT, "a deadlock: vEU %u waits at row %u for event %u, which counts %u and has to count %u",
             fiber->block->position.x, wait.row, wait.event, *events[i].word, wait.target);
    }
}

}  // namespace

unsigned int emulator::event_add(unsigned int *word, unsigned int count, bool releases, bool acquires, int line) {
  Event &event = event_of(word, line);
  if (race_detection && releases) {
    if (!event.released) event.released = new_clock();
    release(current->number, event.released);
  }
  if (acquires && event.released) acquire(current->number, event.released);
  const unsigned before = *word;
  *word += count;
  wake(event.waiters);
  return before;
}

void emulator::yield_thread() {
  slow_rank = MAX_BLOCKS;  // a thread that polls can always run: the slow block never could
  run_last(current);
  switch_to(started < all_threads() ? starting() : next());
}

unsigned int emulator::event_load(const unsigned int *word, bool acquires, int line) {
  Event &event = event_of(word, line);
  yield_thread();
  if (acquires && event.released) acquire(current->number, event.released);
  return *word;
}

void emulator::event_wait(const unsigned int *word, unsigned int target, bool acquires, unsigned int number,
                          unsigned int row, int line) {
  Event &event = event_of(word, line);
  while (static_cast<int>(*word - target) < 0) {
    event_waits[current->number] = {row, number, target};
    yield_until(event.waiters, line);
  }
  if (acquires && event.released) acquire(current->number, event.released);
}
