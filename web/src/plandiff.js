// What differs between two plans of a model. Their nodes may be fused differently: those that share a member are compared together.
import * as f from './format.js';

const isSame = (one, other) => Object.keys(one).length === Object.keys(other).length && Object.keys(one).every((name) => one[name] === other[name]);
const say = (dims) => (Object.keys(dims).length ? `a bucket of ${f.dims(dims)}` : 'fixed shapes');

// The story of these dims in an answer; throws where it has none.
export function findStory(answer, dims) {
  const stories = answer.buckets ?? [answer], found = stories.find((each) => isSame(each.dims, dims));
  if (!found) throw new Error(`this plan has ${say(dims)}, and the other has ${stories.map((each) => say(each.dims)).join(' and ')}: choose a bucket or a plan of the same shapes`);
  return found;
}

// Seconds of a call that are each node's, waits and idle cores: their sum is the call.
export function shareOf(story) {
  const nodes = story.nodes.map(() => 0), other = { copies: 0, waits: 0, signals: 0 };
  for (const each of story.instructions) {
    const seconds = (each.end_s - each.start_s) / (each.veu == null ? 1 : story.veus), node = story.steps[each.step]?.node;
    if (each.kind === 'wait') other.waits += seconds;
    else if (each.kind === 'synchronize') other.signals += seconds;
    else if (node == null) other.copies += seconds;
    else nodes[node] += seconds;
  }
  const used = [...nodes, ...Object.values(other)].reduce((sum, each) => sum + each, 0);
  return { nodes, ...other, idle: Math.max(0, story.seconds - used) };
}

function groupNodes(stories) {
  const owner = new Map(), parent = []; // of members: a group; of groups: another one
  const rootOf = (group) => {
    while (parent[group] !== group) group = parent[group] = parent[parent[group]];
    return group;
  };
  const groupOf = stories.map(({ nodes }) => nodes.map((node) => {
    const group = parent.push(parent.length) - 1;
    for (const member of node.members) {
      if (owner.has(member)) parent[rootOf(owner.get(member))] = rootOf(group);
      else owner.set(member, group);
    }
    return group;
  }));
  const groups = new Map();
  groupOf.forEach((list, side) => list.forEach((group, number) => {
    if (stories[side].nodes[number].view) return;
    const root = rootOf(group);
    if (!groups.has(root)) groups.set(root, [[], []]);
    groups.get(root)[side].push(number);
  }));
  return [...groups.values()];
}

const sum = (list) => list.reduce((all, each) => all + each, 0);
const digests = (story, nodes) => nodes.map((node) => story.kernels[story.nodes[node].kernel]?.digest ?? '').sort().join();

// Rows of what takes other times, the largest difference first: nodes of both sides, seconds of both, whether kernels are equal.
export function diffPlans(stories) {
  const shares = stories.map(shareOf), groups = groupNodes(stories);
  const rows = groups.map((nodes) => ({
    nodes,
    seconds: nodes.map((list, side) => sum(list.map((node) => shares[side].nodes[node]))),
    isEqual: digests(stories[0], nodes[0]) === digests(stories[1], nodes[1]),
  }));
  for (const [key, name] of [['copies', 'copies of results'], ['waits', 'waits for other cores'], ['signals', 'launches, signals and waits'], ['idle', 'idle cores']]) {
    rows.push({ name, nodes: [[], []], seconds: shares.map((share) => share[key]), isEqual: true });
  }
  const most = Math.max(...stories.map((story) => story.seconds)), off = ({ seconds: [one, other] }) => Math.abs(one - other);
  return {
    isSameModel: !groups.length || groups.some(([one, other]) => one.length && other.length),
    rows: rows.filter((row) => !row.isEqual || off(row) > 1e-9 * most).sort((a, b) => off(b) - off(a)),
  };
}

const countOf = (list, kind) => list.filter((each) => each.kind === kind).length;
const FIGURES = [
  ['plan', (story) => story.plan],
  ['device', (story) => story.device || story.target],
  ['a call', (story) => f.time(story.seconds)],
  ['cores', (story) => f.count(story.veus)],
  ['operators', (story) => f.count(story.nodes.filter((node) => !node.view).length)],
  ['kernels', (story) => f.count(story.kernels.length)],
  ['steps', (story) => f.count(story.steps.length)],
  ['copies', (story) => f.count(countOf(story.steps, 'copy'))],
  ['instructions', (story) => f.count(story.instructions.length)],
  ['waits', (story) => f.count(countOf(story.instructions, 'wait'))],
  ['memory between operators', (story) => f.bytes(story.arena_bytes)],
  ['the same without sharing', (story) => f.bytes(story.tensor_bytes)],
];

// Name and both values of each figure that differs.
export const diffFigures = (stories) => FIGURES.map(([name, say]) => [name, ...stories.map(say)]).filter(([, one, other]) => one !== other);
