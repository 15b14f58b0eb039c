// Steps of a profile, and the operators of the story that they are of.
import * as f from './format.js';

const isStep = (each) => typeof each?.operator === 'string' && [each.start_s, each.end_s].every(Number.isFinite) && each.start_s <= each.end_s && Number.isInteger(each.veu) && each.veu >= 0;

// The steps in a text, which matchProfile checks; undefined where it has none.
export function readProfile(text) {
  try {
    return JSON.parse(text)?.steps;
  } catch {
    return undefined; // no JSON
  }
}

function check(steps, { veus }) {
  if (!Array.isArray(steps) || !steps.length || !steps.every(isStep)) throw new Error('expected the steps of a profile, each with operator, start_s, end_s and veu');
  const other = steps.find(({ veu }) => veu >= veus);
  if (other) throw new Error(`the profile is of another plan: it has a step of core ${other.veu}, and this plan has ${f.plural(veus, 'core')}, counted from 0`);
}

function countBy(list, nameOf) {
  const counts = new Map();
  for (const each of list) counts.set(nameOf(each), (counts.get(nameOf(each)) ?? 0) + 1);
  return counts;
}

// Measured seconds of all cores for each node, and lanes as those of the story. A profile has one step for each
// instruction that works, and one for each step inside of a loop; throws for one of another plan, and for what is none.
export function matchProfile(story, steps) {
  check(steps, story);
  const { instructions, nodes } = story, loops = new Set(story.steps.filter((step) => step.kind === 'loop').map((step) => step.name));
  const numbers = new Map(story.steps.map((step, number) => [step.name, number]));
  const nameOf = (each) => story.steps[each.step].name;
  const worked = instructions.filter((each) => each.step != null && !loops.has(nameOf(each)));
  const expected = countBy(worked, nameOf), given = countBy(steps, (each) => each.operator);
  for (const [name, count] of expected) {
    if (given.get(name) !== count) throw new Error(`the profile is of another plan: it has ${given.get(name) ?? 0} steps of ${name}, and this plan has ${count}`);
  }
  const other = [...given.keys()].find((name) => !expected.has(name));
  if (other && !loops.size) throw new Error(`the profile is of another model: this one has no step ${other}`);
  const seconds = nodes.map(() => 0), predicted = nodes.map(() => 0), lanes = [];
  let others = 0; // of steps in loops, and of copies of results
  for (const each of worked) {
    const { node } = story.steps[each.step];
    if (node != null) predicted[node] += each.end_s - each.start_s;
  }
  for (const { operator, start_s, end_s, veu } of steps) {
    const step = expected.has(operator) ? numbers.get(operator) : undefined, node = story.steps[step]?.node;
    if (node != null) seconds[node] += end_s - start_s;
    else others += end_s - start_s;
    (lanes[veu] ??= []).push({ kind: 'execute', start_s, end_s, step });
  }
  const all = Array.from(lanes, (lane) => (lane ?? []).sort((a, b) => a.start_s - b.start_s));
  return { seconds, predicted, lanes: all, others, predicted_s: story.seconds, end_s: steps.reduce((last, each) => Math.max(last, each.end_s), 0) };
}

// How far a prediction is from a measured time.
export function errorOf(predicted, seconds) {
  const off = predicted / seconds - 1;
  return seconds > 0 ? `${f.percent(Math.abs(off))} ${off > 0 ? 'high' : 'low'}` : '–';
}
// The same in a sentence.
export const sayError = (predicted, seconds) => `${f.time(predicted)} predicted ${seconds > 0 ? `are ${errorOf(predicted, seconds)}` : 'cannot be compared: no time was measured'}`;
