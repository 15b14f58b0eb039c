// Threads of the parallel regions of C kernels: the entry points of libgomp that gcc calls, on workers of our own.
// See docs/adr/0032-run-cpu-kernels-on-workers-of-our-own.md.
//
// A pool has one worker for each CPU, pinned to it. A region runs on its caller and on workers of other CPUs. Workers
// join a region when they arrive, and the caller never waits for a worker that has not joined: a late worker finds
// the loops' iterations taken. A region that asks for a thread's number or the number of threads waits for all of them.
//
// Most regions are one loop. Its workers do not join: they only take chunks, and tell how many they have finished.

#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
  VERSION = 2,  // of struct roller_pool
  LINE = 128,  // bytes: two lines of 64, which x86 prefetches in pairs
  CPUS = 1024,
  LANES = 16,
  POLLS = 1000,  // of a waiting thread without pauses: about 0.5 us, while one pause takes up to 65 ns
  PAUSES = 32,  // between two readings of the clock
  CHECKS = 16,  // regions of a model's call between two readings of the clock
};
// An idle worker spins for SPIN_NS while regions follow each other that soon, and for less where they do not: its CPU
// may be wanted by threads of another library. In a region, and while a model runs regions one after the other, threads
// spin for LONG_SPIN_NS: what they wait for is on its way, and to sleep and wake can take 100 us.
static const int64_t SPIN_NS = 50000, MIN_SPIN_NS = 3000, LONG_SPIN_NS = 1000000, WAKE_NS = 20000, CHECK_NS = 200000;

#ifndef MAX_LOOPS
#define MAX_LOOPS (UINT32_MAX / 2)  // before they are numbered from 0 again
#endif

#ifndef STALL
#define STALL() ((void)0)  // where tests let threads wait
#endif

#define EXPORT __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define STORE(place, value) __atomic_store_n(&(place), value, __ATOMIC_RELEASE)
#define EXCHANGE(place, value) __atomic_exchange_n(&(place), value, __ATOMIC_ACQ_REL)

// What kernels use of a pool, whose code may be another library's.
struct roller_pool {
  int version;
  int (*threads)(void);  // that a region of this thread would have at most
  void (*set_threads)(int threads);  // at most; 0: OMP_NUM_THREADS, or all CPUs
  void (*run)(void (*work)(void *), void *data, unsigned threads, const long *loop);
  bool (*begin)(long first, long end, long step, long chunk, long *from, long *to);
  bool (*next)(long *from, long *to);
  void (*barrier)(void);
  bool (*single)(void);
  int (*number)(void);
  int (*size)(void);
  void (*expect)(bool more);  // regions follow each other from now on, or not any longer
};

// Waiting --------------------------------------------------------------------------------------------------------------

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" : : : "memory");
#endif
}

// Whether the bits of a word that are in the mask change while this thread spins.
static bool changes(const uint64_t *word, uint64_t mask, uint64_t value, int64_t spin_ns) {
  for (int i = 0; i < POLLS; i++)
    if ((LOAD(*word) & mask) != value) return true;
  for (int64_t end = 0;;) {
    for (int i = 0; i < PAUSES; i++) {
      if ((LOAD(*word) & mask) != value) return true;
      relax();
    }
    int64_t now = now_ns();
    if (end == 0) end = now + spin_ns;
    else if (now > end) return false;
  }
}

static void futex_wait(const uint32_t *word, uint32_t value) {
  syscall(SYS_futex, word, 0 | 128, value, NULL, NULL, 0);  // FUTEX_WAIT | FUTEX_PRIVATE_FLAG
}

static void futex_wake(const uint32_t *word) {
  syscall(SYS_futex, word, 1 | 128, INT_MAX, NULL, NULL, 0);  // FUTEX_WAKE | FUTEX_PRIVATE_FLAG
}

static const bool IS_LITTLE = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
static const uint64_t ALL = UINT64_MAX, HIGH = (uint64_t)UINT32_MAX << 32;

static const uint32_t *low_half(const uint64_t *word) { return (const uint32_t *)word + !IS_LITTLE; }
static const uint32_t *high_half(const uint64_t *word) { return (const uint32_t *)word + IS_LITTLE; }

// Teams ----------------------------------------------------------------------------------------------------------------

struct loop {
  long first, step, chunk, end;
  uint64_t chunks;
};

// LOOP: a worker takes chunks while there are any, and leaves the word as it is. REGION: posted by the caller, RUNNING
// by the worker, then IDLE. A caller that sleeps until a worker is done makes RUNNING AWAITED. It makes REGION IDLE if
// its own part is done. A worker that sleeps is SLEEPING.
enum State { IDLE, SLEEPING, LOOP, REGION, RUNNING, AWAITED, STOPPED };

struct worker {
  // Written by callers, for a worker that reads all of it when `posted` changes. What it reads belongs together if
  // `begun`, which is written before everything else, still has the number of the post.
  _Alignas(LINE) uint64_t posted;  // number of the post << 32 | state
  uint32_t begun;
  uint32_t number, lanes, loops;  // the worker's number, lanes of the loop, number of the loop
  void (*work)(void *);
  void *data;
  struct loop loop;
  // Written by the worker.
  _Alignas(LINE) uint32_t done;  // number of the last loop of which it has finished chunks
  uint64_t finished;  // chunks of that loop
  _Alignas(LINE) int cpu;
  bool alive;
  uint32_t posts;
  pthread_t thread;
};

// A region's threads. Words that all of them write have lines of their own.
struct team {
  unsigned size;
  uint32_t loops, singles, barriers;  // how many there were before this region; of a loop, with it
  uint32_t era;  // how often the loops began again at 0
  unsigned posted;
  struct worker *workers[CPUS];
  struct {
    _Alignas(LINE) uint64_t taken;  // number of the loop << 32 | chunks of the lane that are taken
  } lanes[LANES];
  _Alignas(LINE) uint64_t sync;  // barriers passed << 32 | SLEEPERS | threads at the barrier << 16 | threads that joined
  uint32_t claimed;  // single constructs that a thread has taken
  _Alignas(LINE) uint32_t awaited;  // whether the caller of a loop sleeps until its chunks are finished
};

#define SLEEPERS 0x80000000u
#define ARRIVED(sync) ((sync) >> 16 & 0x7fff)
#define JOINED(sync) ((sync)&0xffff)

// A thread's place in its region.
struct place {
  struct team *team;  // NULL: the thread is alone
  unsigned number;
  uint32_t lanes;
  uint32_t loops, singles, barriers;  // that it has come to, in all regions
  struct loop loop;
  uint32_t lane, exhausted;  // of the current loop: where the thread takes chunks, and how many lanes have none left
  uint64_t taken;  // chunks of the current loop
  bool has_chunk;  // from, to: a chunk that it took before it began to work
  long from, to;
  const uint64_t *posted;  // of a worker without a chunk: its word, which has to keep its value
  uint64_t value;
};

static _Thread_local struct place *current, outside;

static struct {
  uint32_t busy;  // a region has the workers
  int alone;  // regions that run on their callers alone
  uint32_t series;  // callers that run regions one after the other
  bool ready;
  int limit, environment;  // of threads; 0: none
  int64_t checked_ns;
  int unchecked;  // regions since the clock was read
  pthread_t caller;
  cpu_set_t allowed;
  int count;  // of allowed CPUs
  struct worker *workers[CPUS];  // of the allowed CPUs
  short index[CPUS];  // of a CPU's worker among them, or -1
  struct worker *all[CPUS];  // by CPU
  struct team team;
} own;

static struct loop loop_of(long first, long end, long step, long chunk) {
  uint64_t trips = 0;
  if (step > 0 && end > first) trips = ((uint64_t)end - first + step - 1) / step;
  if (step < 0 && end < first) trips = ((uint64_t)first - end - step - 1) / -(uint64_t)step;
  if (chunk < 1) chunk = 1;
  return (struct loop){first, step, chunk, end, (trips + chunk - 1) / chunk};
}

static bool give(const struct loop *loop, uint64_t chunk, long *from, long *to) {
  *from = loop->first + (long)chunk * loop->chunk * loop->step;
  *to = chunk + 1 == loop->chunks ? loop->end : *from + loop->chunk * loop->step;
  return true;
}

// Takes the next chunk of the current loop. Lane l of n has the chunks l, l + n, ... A thread begins with its own lane,
// so that it finds in its cache what it used in the call before, and then takes chunks of other lanes. A thread that
// begins a loop has seen the previous one exhausted: the counters pass to the loop without a reset, and loops before it
// have no chunks left.
static bool next(long *from, long *to) {
  struct place *at = current ? current : &outside;
  struct team *team = at->team;
  if (team == NULL) return at->taken < at->loop.chunks && give(&at->loop, at->taken++, from, to);
  if (at->has_chunk) {
    at->has_chunk = false;
    *from = at->from;
    *to = at->to;
    return true;
  }
  for (; at->exhausted < at->lanes; at->exhausted++, at->lane = at->lane + 1 < at->lanes ? at->lane + 1 : 0) {
    uint64_t *counter = &team->lanes[at->lane].taken, taken = LOAD(*counter), new, chunk;
    do {
      uint32_t loop = (uint32_t)(taken >> 32), count = loop < at->loops ? 0 : (uint32_t)taken;
      if (loop > at->loops) return false;
      chunk = (uint64_t)count * at->lanes + at->lane;
      new = ((uint64_t)at->loops << 32) + count + 1;
      if (at->posted) {
        STALL();
        if (LOAD(*at->posted) != at->value) return false;
      }
    } while (chunk < at->loop.chunks
        && !__atomic_compare_exchange_n(counter, &taken, new, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    if (chunk < at->loop.chunks) {
      at->taken++;
      at->posted = NULL;
      return give(&at->loop, chunk, from, to);
    }
  }
  return false;
}

static uint32_t count_lanes(const struct team *team) { return team->size < LANES ? team->size : LANES; }

static void enter_loop(struct place *at) {
  at->taken = 0;
  at->exhausted = 0;
  at->lane = at->number % at->lanes;
}

static bool begin(long first, long end, long step, long chunk, long *from, long *to) {
  struct place *at = current ? current : &outside;
  at->loop = loop_of(first, end, step, chunk);
  at->loops++;
  if (at->team) enter_loop(at);
  else at->taken = 0;
  return next(from, to);
}

static void barrier(void) {
  struct place *at = current;
  if (at == NULL || at->team == NULL) return;
  struct team *team = at->team;
  const uint32_t *passed = high_half(&team->sync);
  uint32_t barrier = at->barriers++;
  uint64_t sync = LOAD(team->sync), new;
  bool last;
  do {
    if ((uint32_t)(sync >> 32) != barrier) return;  // the others passed it before this thread joined
    last = ARRIVED(sync) + 1 == JOINED(sync);
    new = last ? (uint64_t)(barrier + 1) << 32 | JOINED(sync) : sync + 0x10000;
  } while (!__atomic_compare_exchange_n(&team->sync, &sync, new, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  if (last) {
    if (sync & SLEEPERS) futex_wake(passed);
    return;
  }
  if (!changes(&team->sync, HIGH, (uint64_t)barrier << 32, LONG_SPIN_NS)) {
    do {
      sync = __atomic_fetch_or(&team->sync, SLEEPERS, __ATOMIC_ACQ_REL);
      if ((uint32_t)(sync >> 32) == barrier) futex_wait(passed, barrier);
    } while (LOAD(*passed) == barrier);
  }
  (void)LOAD(team->sync);  // in the memory model, what the others wrote is ordered by the whole word
}

static bool single(void) {
  struct place *at = current;
  if (at == NULL || at->team == NULL) return true;
  uint32_t mine = at->singles++;
  return LOAD(at->team->claimed) == mine
      && __atomic_compare_exchange_n(&at->team->claimed, &mine, mine + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

// Waits until every worker that the region asked for has joined it.
static void join_all(const struct team *team) {
  for (unsigned i = 0; i < team->posted; i++)
    while ((uint32_t)LOAD(team->workers[i]->posted) == REGION) sched_yield();
}

static int number(void) {
  struct place *at = current;
  if (at == NULL || at->team == NULL) return 0;
  join_all(at->team);
  return (int)at->number;
}

static int size(void) {
  struct place *at = current;
  if (at == NULL || at->team == NULL) return 1;
  join_all(at->team);
  return (int)at->team->size;
}

static void work_at(struct place *at, void (*work)(void *), void *data) {
  struct place *outer = current;
  current = at;
  work(data);
  current = outer;
}

static void work_alone(void (*work)(void *), void *data, const long *loop) {
  struct place at = {0};
  if (loop) at.loop = loop_of(loop[0], loop[1], loop[2], loop[3]);
  work_at(&at, work, data);
}

// Workers --------------------------------------------------------------------------------------------------------------

static void join_region(const struct worker *self) {
  struct team *team = &own.team;
  struct place at = {.team = team, .number = self->number, .lanes = self->lanes, .loops = team->loops,
                     .singles = team->singles, .barriers = team->barriers};
  __atomic_fetch_add(&team->sync, 1, __ATOMIC_ACQ_REL);
  work_at(&at, self->work, self->data);
}

// Takes chunks of a loop that may be over already: what was posted is read at once, and a chunk is taken before the
// work begins, whose data may not exist any longer without one.
static void join_loop(struct worker *self, uint64_t value) {
  struct place at = {
    .team = &own.team, .number = LOAD(self->number), .lanes = LOAD(self->lanes), .loops = LOAD(self->loops),
    .loop = {LOAD(self->loop.first), LOAD(self->loop.step), LOAD(self->loop.chunk), LOAD(self->loop.end),
             LOAD(self->loop.chunks)},
    .posted = &self->posted, .value = value,
  };
  STALL();
  void (*work)(void *) = LOAD(self->work);
  void *data = LOAD(self->data);
  if (LOAD(self->begun) != (uint32_t)(value >> 32)) return;
  enter_loop(&at);
  struct place *outer = current;
  current = &at;
  at.has_chunk = next(&at.from, &at.to);
  current = outer;
  if (!at.has_chunk) return;
  work_at(&at, work, data);
  self->finished = at.taken;
  __atomic_exchange_n(&self->done, at.loops, __ATOMIC_SEQ_CST);
  uint32_t *awaited = &at.team->awaited;
  if (__atomic_load_n(awaited, __ATOMIC_SEQ_CST) && EXCHANGE(*awaited, 0)) futex_wake(awaited);
}

// Whether something is posted to a worker while it spins.
static bool is_posted(const struct worker *self, uint64_t value, int64_t spin_ns) {
  for (int64_t end = 0; LOAD(own.series);) {
    if (changes(&self->posted, ALL, value, MIN_SPIN_NS)) return true;
    int64_t now = now_ns();
    if (end == 0) end = now + LONG_SPIN_NS;
    else if (now > end) break;
  }
  return changes(&self->posted, ALL, value, spin_ns);
}

// Replaces the state of a worker, unless its word has changed.
static bool replace_state(struct worker *worker, uint64_t value, enum State state) {
  return __atomic_compare_exchange_n(
      &worker->posted, &value, (value & HIGH) | state, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static void *serve(void *argument) {
  struct worker *self = argument;
  int64_t spin_ns = SPIN_NS;
  uint64_t seen = IDLE;  // the last loop
  for (;;) {
    uint64_t value = LOAD(self->posted);
    uint32_t state = (uint32_t)value;
    if (state == STOPPED) return NULL;
    if (state == LOOP && value != seen) {
      join_loop(self, value);
      seen = value;
    } else if (state == REGION) {
      if (!replace_state(self, value, RUNNING)) continue;
      join_region(self);
      if ((uint32_t)EXCHANGE(self->posted, (value & HIGH) | IDLE) == AWAITED) futex_wake(low_half(&self->posted));
    } else if (is_posted(self, value, spin_ns)) {
      spin_ns = SPIN_NS;
    } else {
      int64_t asleep_ns = now_ns();
      if (!replace_state(self, value, SLEEPING)) continue;
      while ((uint32_t)LOAD(self->posted) == SLEEPING) futex_wait(low_half(&self->posted), SLEEPING);
      int64_t idle_ns = spin_ns + now_ns() - asleep_ns;
      spin_ns = idle_ns < SPIN_NS + WAKE_NS ? SPIN_NS : spin_ns / 2;
      if (spin_ns < MIN_SPIN_NS) spin_ns = MIN_SPIN_NS;
    }
  }
}

static void pin(const struct worker *worker) {
  cpu_set_t cpu;
  CPU_ZERO(&cpu);
  CPU_SET(worker->cpu, &cpu);
  pthread_setaffinity_np(worker->thread, sizeof cpu, &cpu);
}

// Starts a worker. Signals go to the threads of the program.
static bool start(struct worker *worker) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  worker->posted = IDLE;
  worker->posts = worker->done = 0;
  worker->alive = pthread_create(&worker->thread, NULL, serve, worker) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (worker->alive) {
    pin(worker);
    pthread_setname_np(worker->thread, "roller-worker");
  }
  return worker->alive;
}

// A child process has no workers, and a region of its parent does not end in it.
static void forget_workers(void) {
  for (int cpu = 0; cpu < CPUS; cpu++)
    if (own.all[cpu]) own.all[cpu]->alive = false;
  own.busy = 0;
  own.alone = 0;
  own.series = 0;
}

// Reads which CPUs the calling thread may use.
static void check_cpus(int64_t now) {
  cpu_set_t allowed;
  own.checked_ns = now;
  own.caller = pthread_self();
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_EQUAL(&allowed, &own.allowed)) return;
  own.allowed = allowed;
  own.count = 0;
  for (int cpu = 0; cpu < CPUS; cpu++) {
    own.index[cpu] = -1;
    if (!CPU_ISSET(cpu, &allowed)) continue;
    struct worker *worker = own.all[cpu];
    if (worker == NULL) {
      worker = own.all[cpu] = aligned_alloc(LINE, sizeof *worker);
      if (worker == NULL) continue;
      memset(worker, 0, sizeof *worker);
      worker->cpu = cpu;
    } else if (worker->alive) {
      pin(worker);  // something else may have changed its mask
    }
    own.index[cpu] = (short)own.count;
    own.workers[own.count++] = worker;
  }
}

static void prepare(void) {
  own.ready = true;
  const char *set = getenv("OMP_NUM_THREADS");
  long threads = set ? strtol(set, NULL, 10) : 0;
  own.environment = threads > 0 && threads < INT_MAX ? (int)threads : 0;
  pthread_atfork(NULL, NULL, forget_workers);
}

static int limited(int count) {
  int limit = __atomic_load_n(&own.limit, __ATOMIC_RELAXED);
  if (limit == 0) limit = own.environment;
  return limit > 0 && limit < count ? limit : count;
}

// Regions --------------------------------------------------------------------------------------------------------------

// Posts a region to workers of CPUs after the caller's. `loop`: the region is that loop.
static void post(struct team *team, void (*work)(void *), void *data, const struct loop *loop) {
  int cpu = sched_getcpu(), at = cpu >= 0 && cpu < CPUS ? own.index[cpu] : -1;
  unsigned posted = 0;
  for (int i = 0; i < own.count && posted + 1 < team->size; i++) {
    if (++at >= own.count) at = 0;
    struct worker *worker = own.workers[at];
    if (worker->cpu == cpu || UNLIKELY(!worker->alive && !start(worker))) continue;
    team->workers[posted++] = worker;
  }
  team->size = posted + 1;
  team->posted = posted;
  for (unsigned i = 0; i < posted; i++) {
    struct worker *worker = team->workers[i];
    __atomic_store_n(&worker->begun, ++worker->posts, __ATOMIC_RELAXED);
    STORE(worker->number, i + 1);
    STORE(worker->lanes, count_lanes(team));
    STORE(worker->work, work);
    STORE(worker->data, data);
    if (loop) {
      STORE(worker->loops, team->loops);
      STORE(worker->loop.first, loop->first);
      STORE(worker->loop.step, loop->step);
      STORE(worker->loop.chunk, loop->chunk);
      STORE(worker->loop.end, loop->end);
      STORE(worker->loop.chunks, loop->chunks);
    }
    STALL();
    uint64_t before = EXCHANGE(worker->posted, (uint64_t)worker->posts << 32 | (loop ? LOOP : REGION));
    if ((uint32_t)before == SLEEPING) futex_wake(low_half(&worker->posted));
  }
}

static void wait_for_team(const struct team *team) {
  for (unsigned i = 0; i < team->posted; i++) {
    struct worker *worker = team->workers[i];
    replace_state(worker, (uint64_t)worker->posts << 32 | REGION, IDLE);
  }
  for (unsigned i = 0; i < team->posted; i++) {
    struct worker *worker = team->workers[i];
    uint64_t running = (uint64_t)worker->posts << 32 | RUNNING;
    if (LOAD(worker->posted) != running || changes(&worker->posted, ALL, running, LONG_SPIN_NS)) continue;
    if (replace_state(worker, running, AWAITED))
      while ((uint32_t)LOAD(worker->posted) == AWAITED) futex_wait(low_half(&worker->posted), AWAITED);
  }
}

// Whether workers have finished that many chunks of the current loop.
static bool have_finished(const struct team *team, uint64_t chunks) {
  for (unsigned i = 0; i < team->posted && chunks > 0; i++) {
    const struct worker *worker = team->workers[i];
    if (__atomic_load_n(&worker->done, __ATOMIC_SEQ_CST) == team->loops) chunks -= worker->finished;
  }
  return chunks == 0;
}

static void wait_for_chunks(struct team *team, uint64_t chunks) {
  for (int i = 0; i < POLLS; i++)
    if (have_finished(team, chunks)) return;
  for (int64_t end = 0;;) {
    for (int i = 0; i < PAUSES; i++) {
      if (have_finished(team, chunks)) return;
      relax();
    }
    int64_t now = now_ns();
    if (end == 0) end = now + LONG_SPIN_NS;
    else if (now > end) break;
  }
  for (;;) {
    __atomic_exchange_n(&team->awaited, 1, __ATOMIC_SEQ_CST);
    if (have_finished(team, chunks)) break;
    futex_wait(&team->awaited, 1);
  }
  __atomic_store_n(&team->awaited, 0, __ATOMIC_RELEASE);
}

// Numbers loops from 0 again. A worker that has not taken a chunk of an earlier loop yet cannot take one later: its word
// changes, and no counter has a value that it had before.
static void renumber_loops(struct team *team) {
  for (int cpu = 0; cpu < CPUS; cpu++) {
    struct worker *worker = own.all[cpu];
    if (worker == NULL || !worker->alive) continue;
    uint64_t value = LOAD(worker->posted);
    if ((uint32_t)value == LOOP) replace_state(worker, value, IDLE);
    worker->done = 0;
  }
  team->era++;
  for (int i = 0; i < LANES; i++) __atomic_store_n(&team->lanes[i].taken, team->era, __ATOMIC_RELEASE);
  team->loops = 0;
}

// Runs a region on its caller alone, and leaves its CPU out of other regions.
static void work_beside(void (*work)(void *), void *data, const long *loop) {
  __atomic_fetch_add(&own.alone, 1, __ATOMIC_RELAXED);
  work_alone(work, data, loop);
  __atomic_fetch_sub(&own.alone, 1, __ATOMIC_RELAXED);
}

static void run(void (*work)(void *), void *data, unsigned threads, const long *loop) {
  if (threads == 1 || current != NULL) {
    work_alone(work, data, loop);
    return;
  }
  if (__atomic_exchange_n(&own.busy, 1, __ATOMIC_ACQUIRE)) {
    work_beside(work, data, loop);
    return;
  }
  if (UNLIKELY(!own.ready)) prepare();
  if (!LOAD(own.series) || ++own.unchecked > CHECKS || own.caller != pthread_self()) {
    int64_t now = now_ns();
    own.unchecked = 0;
    if (now - own.checked_ns > CHECK_NS || UNLIKELY(own.caller != pthread_self())) check_cpus(now);
  }
  int most = limited(own.count - __atomic_load_n(&own.alone, __ATOMIC_RELAXED));  // others run on their own CPUs
  if (most < 1) most = 1;
  struct team *team = &own.team;
  team->size = threads == 0 || threads > (unsigned)most ? (unsigned)most : threads;
  if (team->size <= 1) {
    __atomic_store_n(&own.busy, 0, __ATOMIC_RELEASE);
    work_beside(work, data, loop);
    return;
  }
  if (UNLIKELY(team->loops > MAX_LOOPS)) renumber_loops(team);
  struct place at = {.team = team};
  if (loop) {
    at.loop = loop_of(loop[0], loop[1], loop[2], loop[3]);
    team->loops++;
    post(team, work, data, &at.loop);
  } else {
    team->sync = (uint64_t)team->barriers << 32 | 1;
    post(team, work, data, NULL);
  }
  at.lanes = count_lanes(team);
  at.loops = team->loops;
  at.singles = team->singles;
  at.barriers = team->barriers;
  enter_loop(&at);
  work_at(&at, work, data);
  if (loop) {
    if (at.taken < at.loop.chunks) wait_for_chunks(team, at.loop.chunks - at.taken);
  } else {
    wait_for_team(team);
    team->loops = at.loops;
    team->singles = at.singles;
    team->barriers = at.barriers;
  }
  __atomic_store_n(&own.busy, 0, __ATOMIC_RELEASE);
}

static int threads(void) {
  if (current != NULL) return 1;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  int count = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  if (!__atomic_exchange_n(&own.busy, 1, __ATOMIC_ACQUIRE)) {
    if (!own.ready) prepare();
    own.checked_ns = 0;  // the next region reads the mask, too
    __atomic_store_n(&own.busy, 0, __ATOMIC_RELEASE);
  }
  return limited(count > 0 ? count : 1);
}

static void set_threads(int threads) { __atomic_store_n(&own.limit, threads > 0 ? threads : 0, __ATOMIC_RELAXED); }

static void expect(bool more) { __atomic_fetch_add(&own.series, more ? 1 : -1, __ATOMIC_ACQ_REL); }

static struct roller_pool interface = {
  VERSION, threads, set_threads, run, begin, next, barrier, single, number, size, expect,
};
static const struct roller_pool *pool = &interface;

// Ends the workers before their code is unloaded. At the end of the program a region may still be running.
__attribute__((destructor)) static void stop_workers(void) {
  if (__atomic_exchange_n(&own.busy, 1, __ATOMIC_ACQUIRE)) return;
  for (int cpu = 0; cpu < CPUS; cpu++) {
    struct worker *worker = own.all[cpu];
    if (worker == NULL) continue;
    if (worker->alive) {
      if ((uint32_t)EXCHANGE(worker->posted, STOPPED) == SLEEPING) futex_wake(low_half(&worker->posted));
      pthread_join(worker->thread, NULL);
    }
    free(worker);
  }
}

// Kernels of one process share a pool that stays loaded. A pool of another version is refused.
EXPORT struct roller_pool *roller_own_pool(void) { return &interface; }

EXPORT int roller_use_pool(struct roller_pool *given) {
  if (given->version != VERSION) return 0;
  pool = given;
  return 1;
}

// A model calls this before its first region and after its last one.
void roller_expect(int more) { pool->expect(more != 0); }

// Entry points (gcc: omp-builtins.def) ---------------------------------------------------------------------------------

void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) {
  (void)flags;
  pool->run(work, data, threads, NULL);
}

void GOMP_parallel_loop_dynamic(
    void (*work)(void *), void *data, unsigned threads, long first, long end, long step, long chunk, unsigned flags) {
  (void)flags;
  pool->run(work, data, threads, (long[]){first, end, step, chunk});
}

bool GOMP_loop_dynamic_start(long first, long end, long step, long chunk, long *from, long *to) {
  return pool->begin(first, end, step, chunk, from, to);
}

bool GOMP_loop_dynamic_next(long *from, long *to) { return pool->next(from, to); }

void GOMP_loop_end_nowait(void) {}
void GOMP_loop_end(void) { pool->barrier(); }
void GOMP_barrier(void) { pool->barrier(); }
bool GOMP_single_start(void) { return pool->single(); }

#define ALIAS(name) __attribute__((alias(#name)))
void GOMP_parallel_loop_nonmonotonic_dynamic(
    void (*)(void *), void *, unsigned, long, long, long, long, unsigned) ALIAS(GOMP_parallel_loop_dynamic);
bool GOMP_loop_nonmonotonic_dynamic_start(long, long, long, long, long *, long *) ALIAS(GOMP_loop_dynamic_start);
bool GOMP_loop_nonmonotonic_dynamic_next(long *, long *) ALIAS(GOMP_loop_dynamic_next);

int omp_get_max_threads(void) { return pool->threads(); }
int omp_get_num_threads(void) { return pool->size(); }
int omp_get_thread_num(void) { return pool->number(); }
