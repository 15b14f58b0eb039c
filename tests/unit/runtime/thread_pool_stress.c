// Random regions on the pool of roller_svc/toolchain/pool.c, with more workers than CPUs and loops that are often numbered
// from 0 again. Ends with 0 if each iteration ran once, and after those it has to follow.
//
// gcc -I roller_svc/toolchain -DROLLER_POOL -DWORKERS=6 -DMAX_LOOPS=50 thread_pool_stress.c; ./a.out CALLERS SECONDS

#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#if WORKERS > 0
static int all_cpus(int thread, size_t size, cpu_set_t *cpus) {
  (void)thread, (void)size;
  CPU_ZERO(cpus);
  for (int cpu = 0; cpu <= WORKERS; cpu++) CPU_SET(cpu, cpus);
  return 0;
}
#define sched_getaffinity all_cpus
#endif
static void stall(void);
#define STALL() stall()
#include "pool.c"

// Lets every eighth thread come late, by as much as a few regions take.
static void stall(void) {
  static _Thread_local unsigned seed = 1;
  if (rand_r(&seed) % 8) return;
  for (int i = rand_r(&seed) % 20; i > 0; i--) sched_yield();
}

enum { ITERATIONS = 64, SERIES = 300 };
static double seconds;

struct iterations {
  long count, step;
  int runs[ITERATIONS];
};

static void expect_runs(const struct iterations *given, int runs, const char *kind) {
  for (long i = 0; i < given->count; i++) {
    const int expected = i % given->step ? 0 : runs;
    if (given->runs[i] == expected) continue;
    printf("%s: iteration %ld of %ld ran %d times, expected %d\n", kind, i, given->count, given->runs[i], expected);
    exit(1);
  }
}

static void run_one_loop(void *data) {
  struct iterations *given = data;
  long from, to;
  while (GOMP_loop_dynamic_next(&from, &to))
    for (long i = from; i < to; i += given->step) given->runs[i]++;
}

static void run_three_loops(void *data) {
  struct iterations *given = data;
  long from, to;
  for (int loop = 0; loop < 3; loop++) {
    if (GOMP_loop_dynamic_start(0, given->count, 1, 1, &from, &to)) {
      do {
        for (long i = from; i < to; i++) given->runs[i] = given->runs[i] == loop ? loop + 1 : -1;
      } while (GOMP_loop_dynamic_next(&from, &to));
    }
    GOMP_barrier();
  }
}

static void *call_regions(void *argument) {
  unsigned seed = *(unsigned *)argument;
  const int64_t end = now_ns() + (int64_t)(1e9 * seconds);
  while (now_ns() < end) {
    struct iterations given = {1 + rand_r(&seed) % 40, 1, {0}};
    switch (rand_r(&seed) % 4) {
    case 0:
      GOMP_parallel(run_three_loops, &given, rand_r(&seed) % 4, 0);
      expect_runs(&given, 3, "three loops");
      break;
    case 1:
      given.step = 1 + rand_r(&seed) % 3;
      GOMP_parallel_loop_dynamic(run_one_loop, &given, 0, 0, given.count, given.step, 1 + rand_r(&seed) % 5, 0);
      expect_runs(&given, 1, "steps");
      break;
    default:
      GOMP_parallel_loop_dynamic(run_one_loop, &given, rand_r(&seed) % 4, 0, given.count, 1, 1, 0);
      expect_runs(&given, 1, "one loop");
    }
    if (rand_r(&seed) % 2000 == 0) usleep(rand_r(&seed) % 2000);
    if (rand_r(&seed) % 500) continue;
    roller_expect(1);
    for (int i = 0; i < SERIES; i++) {
      struct iterations pair = {2, 1, {0}};
      GOMP_parallel_loop_dynamic(run_one_loop, &pair, 0, 0, 2, 1, 1, 0);
      expect_runs(&pair, 1, "series");
    }
    roller_expect(0);
  }
  return NULL;
}

int main(int count, char **arguments) {
  enum { MOST = 8 };
  pthread_t threads[MOST];
  unsigned seeds[MOST];
  const int callers = count > 1 ? atoi(arguments[1]) : 1;
  seconds = count > 2 ? atof(arguments[2]) : 1;
  for (int i = 0; i < callers && i < MOST; i++) {
    seeds[i] = (unsigned)i + 1;
    pthread_create(&threads[i], NULL, call_regions, &seeds[i]);
  }
  for (int i = 0; i < callers && i < MOST; i++) pthread_join(threads[i], NULL);
  return 0;
}
