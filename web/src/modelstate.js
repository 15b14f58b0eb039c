// What the page of a model shows: the story, the node that is selected, and the part of the time that is looked at.
import { batch, computed, signal } from '@preact/signals';
import { labelOf } from './labels.js';
import { matchProfile } from './profile.js';

export const hasService = signal(true); // false in a file
export const stories = signal([]); // one for each bucket
export const bucket = signal(0);
export const picked = signal(null); // number of a node
export const compared = signal(''); // digest of another plan, which is shown beside it
export const range = signal([0, 1]); // seconds
export const edited = signal(null); // seconds and instructions of the plan as it was edited; null: it was not
export const stored = computed(() => stories.value[bucket.value]); // the story that is shown, of the plan before it was edited
export const model = computed(() => prepare(edited.value ? { ...stored.value, ...edited.value } : stored.value));
export const profile = signal(null); // steps of a call that was measured, which are of this plan
export const measured = computed(() => profile.value && matchProfile(stored.value, profile.value));
export const wholeSeconds = () => Math.max(model.value.story.seconds, measured.value?.end_s ?? 0);

export function show(answer) {
  batch(() => {
    stories.value = answer.buckets ?? [answer];
    bucket.value = 0;
    picked.value = null;
    profile.value = edited.value = null;
    range.value = [0, stories.value[0].seconds];
  });
  const timed = answer.profile?.length ? stories.value.findIndex((story) => isProfileOf(story, answer.profile)) : -1; // a file may have it
  if (timed < 0) return;
  chooseBucket(timed);
  setProfile(answer.profile);
}
// Shows the plan as it was edited, all of its time; null: as it is.
export function setEdited(answer) {
  batch(() => {
    edited.value = answer;
    if (model.value) range.value = [0, wholeSeconds()];
  });
}
// Shows a profile, all of its time; null: none.
export function setProfile(steps) {
  batch(() => {
    profile.value = steps;
    range.value = [0, wholeSeconds()];
  });
}
function isProfileOf(story, steps) {
  try {
    return !!matchProfile(story, steps);
  } catch {
    return false; // of another bucket
  }
}
export function chooseBucket(number) {
  batch(() => {
    bucket.value = number;
    picked.value = null;
    profile.value = edited.value = null;
    range.value = [0, stories.value[number].seconds];
  });
}

// Ranks of nodes: a node is right of all that it reads. Views cost nothing, so they are drawn as edges.
function layOut({ nodes, edges }) {
  const into = nodes.map(() => []);
  for (const { from, to } of edges) into[to].push(from);
  const sources = nodes.map(() => []), ranks = nodes.map(() => 0), wires = [];
  nodes.forEach((node, number) => {
    const real = new Set(into[number].flatMap((each) => (nodes[each].view ? sources[each] : [each])));
    sources[number] = [...real];
    if (node.view) return;
    ranks[number] = Math.max(-1, ...sources[number].map((each) => ranks[each])) + 1;
    for (const each of real) wires.push([each, number]);
  });
  const columns = [], at = nodes.map(() => null);
  nodes.forEach((node, number) => node.view || (columns[ranks[number]] ??= []).push(number));
  columns.forEach((column, rank) => {
    const mean = new Map(column.map((each) => [each, sources[each].reduce((sum, source) => sum + at[source][1], 0) / (sources[each].length || 1)]));
    column.sort((a, b) => mean.get(a) - mean.get(b));
    const middle = column.reduce((sum, each) => sum + mean.get(each), 0) / column.length, first = Math.max(0, Math.round(middle - (column.length - 1) / 2));
    column.forEach((each, i) => (at[each] = [rank, first + i]));
  });
  const rows = Math.max(1, ...at.filter(Boolean).map(([, row]) => row + 1));
  return { at, columns, wires, rows };
}

function prepare(story) {
  if (!story) return null;
  const { nodes, steps, instructions, kernels, buffers } = story;
  const lanes = Array.from({ length: story.veus }, () => []), whole = [], nodeOf = (each) => steps[each.step]?.node ?? null;
  const found = new Map();
  for (const each of instructions) {
    (each.veu == null ? whole : lanes[each.veu]).push(each);
    if (each.veu != null) found.set(`${each.veu}/${each.order}`, each);
  }
  const most = Math.max(...nodes.map((node) => node.seconds), 1e-12);
  const groups = new Map(); // of nodes: by their kernel, and of loops and copies by their operator
  nodes.forEach((node, i) => {
    if (node.view) return;
    const key = node.kernel ?? node.operator, group = groups.get(key) ?? { key, kernel: kernels[node.kernel], nodes: [], total: 0 };
    group.nodes.push(i);
    group.total += node.seconds;
    groups.set(key, group);
    group.above_s = group.kernel?.floor_seconds ? group.nodes.length * (group.kernel.seconds - group.kernel.floor_seconds) : 0;
  });
  const busy = lanes.map((lane) => lane.reduce((sum, each) => sum + (each.kind === 'execute') * (each.end_s - each.start_s), 0));
  const whole_s = whole.reduce((sum, each) => sum + (each.kind !== 'synchronize') * (each.end_s - each.start_s), 0);
  const waits = instructions.filter((each) => each.kind === 'wait');
  return {
    story,
    lanes,
    whole,
    nodeOf,
    found,
    busy: busy.map((seconds) => (seconds + whole_s) / story.seconds),
    waiting: waits.reduce((sum, each) => sum + each.end_s - each.start_s, 0) / (story.seconds * story.veus),
    numWaits: waits.length,
    heat: nodes.map((node) => Math.sqrt(node.seconds / most)),
    hot: [...groups.values()].sort((a, b) => b.total - a.total),
    labels: nodes.map(labelOf),
    graph: layOut(story),
    used: nodes.map((_, i) => new Set(steps.flatMap((step, number) => (step.node === i ? [number] : [])))),
    buffers,
  };
}

// The part of the time that is looked at, moved by shares of its length or scaled around a share.
export function move(share) {
  const [a, b] = range.value, seconds = wholeSeconds(), width = b - a;
  const first = Math.max(0, Math.min(seconds - width, a + share * width));
  range.value = [first, first + width];
}
export function zoom(factor, around = 0.5) {
  const [a, b] = range.value, seconds = wholeSeconds();
  const width = Math.min(seconds, Math.max(seconds / 1e5, (b - a) * factor)), at = a + around * (b - a);
  const first = Math.max(0, Math.min(seconds - width, at - around * width));
  range.value = [first, first + width];
}

// The first instruction of a lane that ends after a time; lanes are in order of time.
export function firstAfter(lane, time) {
  let low = 0, high = lane.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane[middle].end_s > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The address of the page that explains the kernel of a class of nodes.
export function kernelLink({ expression, inputs, constants, outputs }, target) {
  const query = new URLSearchParams({ expr: expression.replaceAll('; ', '\n'), target });
  for (const [name, dtype, shape] of inputs) query.append('input', `${name}=${dtype}[${shape.join(',')}]`);
  for (const name of constants) query.append('constant', name);
  for (const name of outputs) query.append('output', name);
  return `/?${query}`;
}
