"""Wrappers of the instructions of events: counters in device memory that order the rTasks of one kernel.

Orders and scopes are those of the PTX ISA: "Memory Consistency Model", "red", "atom", "ld". The words of the memory that
they share, `sync`, are in ir/event_state.py; an event is a cache line, so that a poll takes no bandwidth from other arrivals.
"""

from __future__ import annotations

from roller_svc.codegen.helpers import Helper
from roller_svc.ir.event_state import ABORT, DEADLINE_MS, DEFAULT_DEADLINE_MS, EVENT_WORDS, STATUS

POLLS_BEFORE_SLEEP = 64
SLEEP_NS = 32

_F = "__device__ __forceinline__"
_EVENT = f"sync + {EVENT_WORDS} * (event + 1)"


def _returned(declared: str, type_: str, template: str, operands: str = "") -> str:
    return f"""{_F} {type_} {declared} {{
  {type_} value;
  asm volatile("{template}" : "=r"(value) : {operands}: "memory");
  return value;
}}"""


EVENT_WRAPPERS = {
    # what other threads of the block wrote is released too, because they have met this one at a barrier
    "event_arrive": Helper(f"""{_F} void event_arrive(unsigned int *sync, unsigned int event, unsigned int tasks) {{
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"({_EVENT}), "r"(tasks) : "memory");
}}"""),
    # returns the arrivals before this one
    "event_finish": Helper(_returned("event_finish(unsigned int *sync, unsigned int event)", "unsigned int",
                                     "atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;", f'"l"({_EVENT}) ')),
    "load_acquire": Helper(_returned("load_acquire(const unsigned int *word)", "unsigned int",
                                     "ld.acquire.gpu.global.u32 %0, [%1];", '"l"(word) ')),
    "load_relaxed": Helper(_returned("load_relaxed(const unsigned int *word)", "unsigned int",
                                     "ld.relaxed.gpu.global.u32 %0, [%1];", '"l"(word) ')),
    "exchange_relaxed": Helper(_returned("exchange_relaxed(unsigned int *word, unsigned int other)", "unsigned int",
                                         "atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;", '"l"(word), "r"(other) ')),
    "sleep_ns": Helper(f"""{_F} void sleep_ns(unsigned int time) {{
  asm volatile("nanosleep.u32 %0;" :: "r"(time) : "memory");
}}"""),
    "timer_ns": Helper(f"""{_F} unsigned long long timer_ns() {{
  unsigned long long value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value) :: "memory");
  return value;
}}"""),
    # returns 0 if this wait or another one of the run has reached the deadline
    "event_wait": Helper(f"""__device__ __noinline__ int event_wait(
    unsigned int *sync, unsigned int event, unsigned int target, unsigned int row) {{
  unsigned long long began = 0;
  for (unsigned int polls = 0;; polls++) {{
    const unsigned int seen = load_acquire({_EVENT});
    if ((int)(seen - target) >= 0) return 1;
    if (polls < {POLLS_BEFORE_SLEEP}) continue;
    sleep_ns({SLEEP_NS});
    if (load_relaxed(sync + {ABORT})) return 0;
    const unsigned long long now = timer_ns();
    const unsigned long long limit_ms = sync[{DEADLINE_MS}] ? sync[{DEADLINE_MS}] : {DEFAULT_DEADLINE_MS};
    if (!began) began = now;
    if (now - began < limit_ms * 1000000) continue;
    if (!exchange_relaxed(sync + {ABORT}, 1)) {{
      sync[{STATUS}] = blockIdx.x;
      sync[{STATUS + 1}] = row;
      sync[{STATUS + 2}] = event;
      sync[{STATUS + 3}] = seen;
      sync[{STATUS + 4}] = target;
    }}
    return 0;
  }}
}}""", ("load_acquire", "load_relaxed", "exchange_relaxed", "sleep_ns", "timer_ns")),
}  # fmt: skip
