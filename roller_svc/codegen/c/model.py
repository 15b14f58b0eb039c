"""ModelPlan → C: a translation unit for each kernel, and one that runs the steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from roller_svc.analysis.model_tables import Functions, Row, list_tables
from roller_svc.codegen.symbols import pointer_type
from roller_svc.ir.kernel import Buffer, KernelSource, LaunchSpec, Phase
from roller_svc.ir.model_plan import ModelPlan
from roller_svc.ir.program import TensorType
from roller_svc.ir.quoting import quote_comment, require_identifier

MODEL = "model"  # begins the functions of a model, before it gets its name
PREFIX_DIGITS = 16  # of the hash in names of a kernel's functions


def kernel_prefix(source: KernelSource) -> str:
    """Return the prefix of the functions of a kernel: equal kernels have one."""
    return key_prefix(source.key)


def key_prefix(key: str) -> str:
    """Return the prefix of the functions of the kernel whose source has that key."""
    return f"k{key[:PREFIX_DIGITS]}"


def kernel_unit(source: KernelSource) -> str:
    """Return a kernel's text, and a function for each launch that takes an array of pointers."""
    prefix = kernel_prefix(source)
    buffers = {b.symbol: b for b in source.buffers}
    adapters = []
    for number, launch in enumerate(source.launches):
        pointers = ", ".join(f"({pointer_type(buffers[symbol])})p[{i}]" for i, symbol in enumerate(launch.args))
        adapters.append(
            f'__attribute__((visibility("hidden"))) void {prefix}_call{number}(char *const *p) {{ {launch.name}({pointers}); }}\n'
        )
        for phase_number, phase in enumerate(launch.phases):
            adapters.append(_phase_adapter(f"{prefix}_tasks{number}_{phase_number}", launch, phase, buffers))
    return f"{source.text}\n{''.join(adapters)}"


def _phase_adapter(name: str, launch: LaunchSpec, phase: Phase, buffers: Mapping[str, Buffer]) -> str:
    """Return a function that runs consecutive tasks of a phase, on the launch's array of pointers."""
    pointers = [f"({pointer_type(buffers[symbol])})p[{launch.args.index(symbol)}]" for symbol in phase.args]
    head = f'__attribute__((visibility("hidden"))) void {name}(char *const *p, long first, long count) {{ '
    if not phase.tasks:
        return f"{head}(void)first, (void)count; {phase.name}({', '.join(pointers)}); }}\n"
    call = f"{phase.name}({', '.join((*pointers, 'task'))});"
    return f"{head}for (long task = first; task < first + count; task++) {call} }}\n"


def model_unit(plan: ModelPlan) -> str:
    """Return the text that runs the plan's steps."""
    tables = list_tables(plan)
    arrays = (
        _array("struct address", "addresses", tables.addresses),
        _array("long", "sizes", tables.sizes),
        _array("struct update", "updates", tables.updates),
        _array("struct step", "steps", tables.steps),
        _array("struct instruction", "instructions", tables.instructions),
        _array("struct wait", "waits", tables.waits),
        _array("struct program", "programs", tables.programs),
        "static const struct tables tables = {addresses, sizes, updates, steps, instructions, waits, programs, "
        f"{tables.prepack_end}, {tables.run_end}}};",
    )
    veus = tables.max_veus if tables.programs else 0
    return _unit(plan, tables.functions, veus, arrays, parameter="", value="&tables")


def switchable_unit(plan: ModelPlan, functions: Functions, max_veus: int) -> str:
    """Return the text whose functions take the tables of a plan, in the struct `tables` behind the status record.

    Plans have the inputs, outputs and slots of `plan`, call `functions`, and have at most `max_veus` vEUs.
    """
    return _unit(plan, functions, max_veus, (), parameter=", const struct tables *bound", value="bound")


def _unit(plan: ModelPlan, functions: Functions, max_veus: int, arrays: Sequence[str], *, parameter: str, value: str) -> str:
    calls = [f"{key_prefix(key)}_call{launch}" for key, launch in functions.calls]
    tasks = [f"{key_prefix(key)}_tasks{launch}_{phase}" for key, launch, phase in functions.tasks]
    parts = [
        _DECLARATIONS,
        *(f"void {name}(char *const *p);" for name in calls),
        *(f"void {name}(char *const *p, long first, long count);" for name in tasks),
        f"enum {{ SLOTS = {plan.num_slots}, INPUTS = {len(plan.inputs)}, OUTPUTS = {len(plan.outputs) + len(plan.states)}, "
        f"ARGUMENTS = {functions.max_arguments}, VEUS = {max(1, max_veus)} }};",
        f"static void (*const calls[])(char *const *) = {{{', '.join(calls) or '0'}}};",
        f"static void (*const tasks[])(char *const *, long, long) = {{{', '.join(tasks) or '0'}}};",
        *arrays,
        _RUN.replace("VIRTUAL_DEVICE", _VIRTUAL_DEVICE if max_veus else "")
        .replace("DEVICE_CALL", _DEVICE_CALL if max_veus else "")
        .replace("BOUND_PARAMETER", parameter).replace("BOUND", value),
    ]  # fmt: skip
    return "\n".join(parts)


def _array(type_: str, name: str, rows: Sequence[Row | int]) -> str:
    listed = [str(row) if isinstance(row, int) else "{" + ", ".join(map(str, row)) + "}" for row in rows]
    lines = ",\n".join(listed or ["{0}" if "struct" in type_ else "0"])
    return f"static const {type_} {name}[] = {{\n{lines}\n}};"


def exported_functions(name: str) -> dict[str, str]:
    """Return the functions that a model of that name exports, and their names in the text of `model_unit`."""
    return {f"{name}_{function}": f"{MODEL}_{function}" for function in ("run", "prepack", "profile")}


def model_header(plan: ModelPlan, name: str, weights: str = "weights.bin", packed: str = "packed.bin") -> str:
    """Return the C header of a model's shared object. `weights` and `packed` name the files beside it."""
    about = [f"{plan.name}: a compiled model for {plan.target}. Tensors are dense and row-major."]
    about += [f"inputs[{i}]: {tensor} {_shown(t)}" for i, (tensor, t) in enumerate(plan.inputs)]
    about += [f"outputs[{i}]: {tensor} {_shown(t)}" for i, (tensor, t) in enumerate(plan.outputs)]
    states = enumerate(plan.states, len(plan.outputs))
    about += [f"outputs[{i}]: state {tensor} {_shown(t)}, updated in place" for i, (tensor, t) in states]
    values = {
        "NUM_INPUTS": str(len(plan.inputs)), "NUM_OUTPUTS": str(len(plan.outputs) + len(plan.states)),
        "WEIGHTS_SIZE": f"{plan.read_weights_bytes}L", "PACKED_SIZE": f"{plan.packed_bytes}L",
        "ARENA_SIZE": f"{plan.arena_bytes}L", "WEIGHTS_FILE": f'"/{weights}"', "PACKED_FILE": f'"/{packed}"',
        "NAME": require_identifier(name),
    }  # fmt: skip
    code = re.sub("|".join(values), lambda match: values[match[0]], _HEADER)
    return quote_comment("\n".join(about)) + code


def _shown(type_: TensorType) -> str:
    return f"{type_.dtype.value}{list(type_.shape)}"


_DECLARATIONS = """#include <string.h>
#define EXPORT __attribute__((visibility("default")))
struct address { int slot; long offset; };                                  /* slot -1: the status record */
struct update { int slot, from; long offset, stride, alternate; };
/* kind 0: call, 1: copy, 2: loop, 3: virtual device */
struct step { int kind; long count; int first, length, zeroed, zeroes, sizes; };
/* of a vEU: execute `count` tasks of a row, or the whole row (tasks -1), or wait (row -1) */
struct instruction { int row, tasks; long first, count; int time; };
struct wait { int veu, order; };
struct program { int first, length; };
struct tables {  /* of a plan: what steps, instructions and programs refer to by numbers */
  const struct address *addresses; const long *sizes; const struct update *updates; const struct step *steps;
  const struct instruction *instructions; const struct wait *waits; const struct program *programs;
  int prepack_end, run_end;                                                  /* steps before prepack_end run once */
};
struct moment { long s, ns; };                                               /* as struct timespec on 64-bit Linux */
int clock_gettime(int, struct moment *);
#ifdef ROLLER_POOL
void roller_expect(int);                                                     /* whether parallel regions follow */
#define EXPECT(more) roller_expect(more)
#else
#define EXPECT(more) ((void)0)
#endif"""

_RUN = """
static char *resolve(char *const *slots, struct address a) { return slots[a.slot] + a.offset; }

static double now(void) {
  struct moment t;
  clock_gettime(1, &t);  /* CLOCK_MONOTONIC */
  return t.s + 1e-9 * t.ns;
}

static void resolve_arguments(const struct tables *t, const struct step *s, char *const *slots, long long *status, char **p) {
  for (int i = 0; i < s->length; i++) {
    const struct address a = t->addresses[s->first + i];
    p[i] = a.slot < 0 ? (char *)status : resolve(slots, a);
  }
}

static void run_call(const struct tables *t, const struct step *s, char *const *slots, long long *status) {
  char *p[ARGUMENTS];
  for (int i = 0; i < s->zeroes; i++) memset(resolve(slots, t->addresses[s->zeroed + i]), 0, t->sizes[s->sizes + i]);
  resolve_arguments(t, s, slots, status, p);
  calls[s->count](p);
}

static void run_copy(const struct tables *t, const struct step *s, char *const *slots) {
  memcpy(resolve(slots, t->addresses[s->first]), resolve(slots, t->addresses[s->first + 1]), s->count);
}
VIRTUAL_DEVICE
/* Run rows [first, end); return the row of a kernel that met an index out of range, or -1.
   Of each call and copy, write its start and end behind *times, unless times is null. */
static long run(const struct tables *t, char **slots, long long *status, double **times, int first, int end) {
  for (int row = first; row < end; row++) {
    const struct step s = t->steps[row];
    if (times && s.kind < 2) *(*times)++ = now();
    if (s.kind == 0) {
      run_call(t, &s, slots, status);
      if (status[0]) return row;
    } else if (s.kind == 1) {
      run_copy(t, &s, slots);
    } else if (s.kind == 2) {
      for (long n = 0; n < s.count; n++) {
        for (int i = s.first; i < s.first + s.length; i++) {
          const struct update u = t->updates[i];
          slots[u.slot] = slots[u.from] + u.offset + n * u.stride + (n & 1) * u.alternate;
        }
        const long failed = run(t, slots, status, times, row + 1, s.zeroed);
        if (failed >= 0) return failed;
      }
      row = s.zeroed - 1;
    }DEVICE_CALL
    if (times && s.kind < 2) *(*times)++ = now();
  }
  return -1;
}

EXPORT long model_prepack(const void *weights, void *packed, void *workspace, long long *status BOUND_PARAMETER) {
  char *slots[SLOTS] = {(char *)weights, packed, workspace};
  return run(BOUND, slots, status, 0, 0, (BOUND)->prepack_end);
}

static long run_steps(const struct tables *t, const void *const *inputs, void *const *outputs, void *workspace,
                      const void *weights, const void *packed, long long *status, double **times) {
  char *slots[SLOTS] = {(char *)weights, (char *)packed, workspace};
  for (int i = 0; i < INPUTS; i++) slots[3 + i] = (char *)inputs[i];
  for (int i = 0; i < OUTPUTS; i++) slots[3 + INPUTS + i] = outputs[i];
  EXPECT(1);
  const long failed = run(t, slots, status, times, t->prepack_end, t->run_end);
  EXPECT(0);
  return failed;
}

EXPORT long model_run(const void *const *inputs, void *const *outputs, void *workspace, const void *weights,
               const void *packed, long long *status BOUND_PARAMETER) {
  return run_steps(BOUND, inputs, outputs, workspace, weights, packed, status, 0);
}

EXPORT long model_profile(const void *const *inputs, void *const *outputs, void *workspace, const void *weights,
                   const void *packed, long long *status BOUND_PARAMETER, double *times) {
  return run_steps(BOUND, inputs, outputs, workspace, weights, packed, status, &times);
}
"""

# A thread that claims a vEU executes its program. One that waits for a vEU without a thread claims it as well, until
# what it waits for is done: so any number of threads can run a plan. Before that it gives other threads GRACE pauses
# to arrive, once in a plan. A thread that waits for very long waits for one that has lost its CPU: the next calls then
# run on one thread, and ever more calls while that goes on.
_VIRTUAL_DEVICE = """
int sched_yield(void);
enum { GRACE = 400, SPINS = 4000, MOST_ALONE = 64 };  /* pauses; calls */
static const double LONG_WAIT_S = 1e-3;

static int calls_alone, last_alone;  /* calls that are to run on one thread; how many there were last */

struct veu { _Alignas(128) int done, claimed; long failed; long long status[4]; };
struct device {
  const struct tables *tables;
  char *const *slots;
  const struct step *step;
  double *times;
  int threads;
  _Alignas(128) int arrived, late;  /* threads; whether one has waited for very long */
  struct veu veus[VEUS];
};

static void relax(int *spins) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" : : : "memory");
#endif
  if (++*spins > SPINS) sched_yield();
}

static int claim(struct veu *veu) {
  return !__atomic_load_n(&veu->claimed, __ATOMIC_RELAXED) && !__atomic_exchange_n(&veu->claimed, 1, __ATOMIC_ACQUIRE);
}

static void release(struct veu *veu) { __atomic_store_n(&veu->claimed, 0, __ATOMIC_RELEASE); }

static void advance(struct device *device, int number, int end, int *grace);

static void wait_for(struct device *device, struct wait wait, int *grace) {
  struct veu *veu = &device->veus[wait.veu];
  double start = 0;
  for (int spins = 0; __atomic_load_n(&veu->done, __ATOMIC_ACQUIRE) <= wait.order;) {
    if (spins > SPINS && start == 0) start = now();
    if (start != 0 && now() - start > LONG_WAIT_S) __atomic_store_n(&device->late, 1, __ATOMIC_RELAXED);
    if (__atomic_load_n(&device->arrived, __ATOMIC_RELAXED) < device->threads && (*grace)-- > 0) {
      relax(&spins);
    } else if (claim(veu)) {
      advance(device, wait.veu, wait.order + 1, grace);
      release(veu);
    } else {
      relax(&spins);
    }
  }
}

static void execute(struct device *device, struct veu *veu, const struct instruction *i) {
  const struct tables *t = device->tables;
  const struct step *s = &t->steps[i->row];
  if (device->times) device->times[2 * i->time] = now();
  if (s->kind == 1) {
    run_copy(t, s, device->slots);
  } else if (i->tasks < 0) {
    run_call(t, s, device->slots, veu->status);
  } else {
    char *p[ARGUMENTS];
    resolve_arguments(t, s, device->slots, veu->status, p);
    tasks[i->tasks](p, i->first, i->count);
  }
  if (veu->status[0] && veu->failed < 0) veu->failed = i->row;
  if (device->times) device->times[2 * i->time + 1] = now();
}

static void advance(struct device *device, int number, int end, int *grace) {
  const struct tables *t = device->tables;
  struct veu *veu = &device->veus[number];
  const struct instruction *program = t->instructions + t->programs[device->step->first + number].first;
  for (int order = veu->done; order < end; order++) {
    const struct instruction *i = &program[order];
    if (i->row < 0)
      for (long w = 0; w < i->count; w++) wait_for(device, t->waits[i->first + w], grace);
    else
      execute(device, veu, i);
    __atomic_store_n(&veu->done, order + 1, __ATOMIC_RELEASE);
  }
}

static long run_device(const struct tables *t, const struct step *s, char *const *slots, long long *status, double **times) {
  const int veus = s->count, alone = __atomic_load_n(&calls_alone, __ATOMIC_RELAXED);
  if (alone > 0) __atomic_store_n(&calls_alone, alone - 1, __ATOMIC_RELAXED);
  struct device device = {t, slots, s, times ? *times : 0, alone > 0 ? 1 : veus, 0, 0, {{0}}};
  for (int v = 0; v < veus; v++) device.veus[v].failed = -1;
  struct device *d = &device;
  #pragma omp parallel num_threads(d->threads)
  {
    int number = __atomic_fetch_add(&d->arrived, 1, __ATOMIC_RELAXED) % veus, grace = GRACE, spins = 0;
    for (int complete = 0; complete < veus; number = (number + 1) % veus) {
      struct veu *veu = &d->veus[number];
      const int end = t->programs[s->first + number].length;
      if (__atomic_load_n(&veu->done, __ATOMIC_ACQUIRE) == end) {
        complete++;
        continue;
      }
      complete = 0;
      if (claim(veu)) {
        advance(d, number, end, &grace);
        release(veu);
      } else {
        relax(&spins);
      }
    }
  }
  if (alone == 0) {
    const int next = device.late ? 2 * __atomic_load_n(&last_alone, __ATOMIC_RELAXED) + 1 : 0;
    __atomic_store_n(&last_alone, next < MOST_ALONE ? next : MOST_ALONE, __ATOMIC_RELAXED);
    __atomic_store_n(&calls_alone, next < MOST_ALONE ? next : MOST_ALONE, __ATOMIC_RELAXED);
  }
  if (times) *times += 2 * s->length;
  for (int v = 0; v < veus; v++) {
    if (device.veus[v].failed < 0) continue;
    memcpy(status, device.veus[v].status, sizeof device.veus[v].status);
    return device.veus[v].failed;
  }
  return -1;
}
"""

_DEVICE_CALL = """ else {
      const long failed = run_device(t, &s, slots, status, times);
      if (failed >= 0) return failed;
      row = s.zeroed - 1;
    }"""

_HEADER = """#ifndef NAME_MODEL_H
#define NAME_MODEL_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __cplusplus
extern "C" {
#endif
enum { NAME_INPUTS = NUM_INPUTS, NAME_OUTPUTS = NUM_OUTPUTS };
#define NAME_WORKSPACE_BYTES ARENA_SIZE
#define NAME_PACKED_BYTES PACKED_SIZE
#define NAME_WEIGHTS_BYTES WEIGHTS_SIZE

/* Run the model. Returns -1, or the number of a step that met an index out of range. Calls may overlap if each has a
   workspace of its own. weights, packed: the contents of the files. status: four zeros; after a failure status[2] is
   the index. Weights and workspace are aligned to 64 bytes, inputs and outputs to their elements. */
long NAME_run(const void *const *inputs, void *const *outputs, void *workspace, const void *weights,
              const void *packed, long long *status);

/* Share one thread pool: before the first call, NAME_use_pool with the pool of a library that is unloaded later.
   Returns 0 if that has another version. Models that gcc compiles for Linux have these. */
void *NAME_own_pool(void);
int NAME_use_pool(void *pool);

/* The same, for programs that have one call at a time: open the folder, call, close. */
struct NAME { void *weights, *packed, *workspace; };

static inline void *NAME_memory(long bytes) { return aligned_alloc(64, (size_t)(bytes + 127) / 64 * 64); }

static inline void *NAME_read(const char *folder, const char *file_name, long bytes) {
  char path[4096];
  void *memory = NAME_memory(bytes);
  const int length = snprintf(path, sizeof path, "%s%s", folder, file_name);
  FILE *file = memory && length > 0 && length < (int)sizeof path ? fopen(path, "rb") : NULL;
  const int complete = file && fread(memory, 1, (size_t)bytes, file) == (size_t)bytes;
  if (file) fclose(file);
  if (complete) return memory;
  free(memory);
  return NULL;
}

static inline void NAME_close(struct NAME *model) {
  free(model->weights);
  free(model->packed);
  free(model->workspace);
  memset(model, 0, sizeof *model);
}

/* Read the weights. Returns 0, or -1 if a file cannot be read or there is no memory. */
static inline int NAME_open(struct NAME *model, const char *folder) {
  model->weights = NAME_read(folder, WEIGHTS_FILE, NAME_WEIGHTS_BYTES);
  model->packed = NAME_read(folder, PACKED_FILE, NAME_PACKED_BYTES);
  model->workspace = NAME_memory(NAME_WORKSPACE_BYTES);
  if (model->weights && model->packed && model->workspace) return 0;
  NAME_close(model);
  return -1;
}

static inline long NAME_call(struct NAME *model, const void *const *inputs, void *const *outputs) {
  long long status[4] = {0, 0, 0, 0};
  return NAME_run(inputs, outputs, model->workspace, model->weights, model->packed, status);
}
#ifdef __cplusplus
}
#endif
#endif
"""
