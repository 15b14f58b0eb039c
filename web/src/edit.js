import { isRefusal } from './problem.js';

// A plan that is edited: instructions are objects, so that waits still mean the same ones after a move. An instruction that
// executes has a key, which stays: each rTask is executed once.
export const launchesOf = (plan) => plan.steps.filter((step) => 'vdevice' in step);

// [launch][vEU][order] of { execute } or { wait: instructions }, and the name of the node of each that executes.
export function readPrograms(plan, given) {
  return launchesOf(plan).map(({ steps, operators, vdevice }, launch) => {
    const programs = (given?.[launch] ?? vdevice.programs).map((program) => program.map((each) => (each.wait ? { launch, wait: each.wait } : { launch, execute: each.execute, key: [launch, ...each.execute].join('/'), node: steps[operators[each.execute[0]][0]].node })));
    for (const each of programs.flat()) {
      if (each.wait) each.wait = each.wait.map(([veu, order]) => programs[veu][order]);
    }
    return programs;
  });
}

// As plans have them. A wait for what was removed, or for nothing, is left out.
export function writePrograms(launches) {
  return launches.map((programs) => {
    const kept = programs.map((program) => program.filter((each) => each.execute || each.wait.some((awaited) => programs.some((other) => other.includes(awaited)))));
    const at = new Map(kept.flatMap((program, veu) => program.map((each, order) => [each, [veu, order]])));
    return kept.map((program) => program.map(({ execute, wait }) => (execute ? { execute } : { wait: wait.filter((each) => at.has(each)).map((each) => at.get(each)) })));
  });
}

export const writePlan = (plan, programs) => {
  const left = [...programs];
  return { ...plan, steps: plan.steps.map((step) => ('vdevice' in step ? { ...step, vdevice: { ...step.vdevice, programs: left.shift() } } : step)) };
};

export const findKey = (launches, key) => launches.flat(2).find((each) => each.key === key);

export function placeOf(launches, instruction) {
  const programs = launches[instruction.launch], veu = programs.findIndex((program) => program.includes(instruction));
  return [veu, programs[veu].indexOf(instruction)];
}

// Each changes the programs in place; false: there is nothing to change.
export function moveBy(launches, instruction, by) {
  const [veu, order] = placeOf(launches, instruction), program = launches[instruction.launch][veu];
  if (!program[order + by]) return false;
  [program[order], program[order + by]] = [program[order + by], program[order]];
  return true;
}

// Moves to another core, behind what starts there before it; `startOf` has the starts of the last legal plan.
export function moveToCore(launches, instruction, by, startOf) {
  const [veu, order] = placeOf(launches, instruction), programs = launches[instruction.launch], other = programs[(veu + by + programs.length) % programs.length];
  if (other === programs[veu]) return false;
  programs[veu].splice(order, 1);
  const first = other.findIndex((each) => startOf.get(each.key) >= startOf.get(instruction.key));
  other.splice(first < 0 ? other.length : first, 0, instruction);
  return true;
}

export function dropWait(launches, instruction) {
  const [veu, order] = placeOf(launches, instruction), program = launches[instruction.launch][veu];
  if (!program[order - 1]?.wait) return false;
  program.splice(order - 1, 1);
  return true;
}

// Has an instruction wait for all of a node that other cores execute.
export function addWait(launches, instruction, node) {
  const [veu, order] = placeOf(launches, instruction), programs = launches[instruction.launch];
  const wait = programs.flatMap((program, other) => (other === veu ? [] : program.filter((each) => each.node === node).slice(-1)));
  if (!wait.length) return false;
  programs[veu].splice(order, 0, { launch: instruction.launch, wait });
  return true;
}

// What the service said of a plan, if it did: an answer in its place has no times.
export function readChecked(answer) {
  if (!Number.isFinite(answer?.seconds) || !Array.isArray(answer.instructions)) throw new Error('the answer has no seconds and instructions');
  return answer;
}

// Whether a problem is a verdict on the plan, rather than a service that is busy or away.
export const isVerdict = (problem) => isRefusal(problem) && problem.code !== 'no-answer';

// When each instruction that executes starts, by its key and the instructions of a story, whose orders count over all launches.
export function startsOf(launches, instructions) {
  const known = new Map(instructions.filter((each) => each.veu != null).map((each) => [`${each.veu}/${each.order}`, each.start_s])), starts = new Map(), before = [];
  for (const programs of launches) {
    programs.forEach((program, veu) => {
      program.forEach((each, order) => each.key && starts.set(each.key, known.get(`${veu}/${(before[veu] ?? 0) + order}`)));
    });
    programs.forEach((program, veu) => (before[veu] = (before[veu] ?? 0) + program.length));
  }
  return starts;
}
