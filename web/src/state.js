// What the page shows. The address has all that is needed to show it again.
import { batch, computed, effect, signal } from '@preact/signals';
import { ProblemError, getJson, post } from './api.js';
import { EXAMPLES } from './examples.js';
import { inferInputs } from './infer.js';
import { scaled } from './scale.js';

const DTYPE = 'float16'; // of the first input that has no other

// What is asked
export const text = signal('');
export const inputs = signal({}); // name → { dtype, shape }
export const constants = signal([]);
export const target = signal('');
export const spec = signal(null); // of the target, once it is needed
export const factors = signal({}); // resource → factor of the target's own
const edited = signal(null); // a spec by hand, in place of the target's
export const hardware = computed(() => {
  const base = edited.value ?? spec.value;
  return base && (edited.value || Object.keys(factors.value).length) ? scaled(base, factors.value) : null;
});

// The last type of each input, and of each input with a rank: a dimension that is typed anew keeps its extent.
const seen = new Map();
const lastType = (name, rank) => seen.get(rank === undefined ? name : `${name}/${rank}`);
function remember(types) {
  for (const [name, type] of Object.entries(types)) seen.set(name, type).set(`${name}/${type.shape.length}`, type);
  return types;
}
const infer = (expression) => remember(inferInputs(expression, lastType, DTYPE));

// What the service said
export const devices = signal([]);
export const story = signal(null); // of kernels:explain
export const explained = signal(null); // the body that it answers
export const explainedMs = signal(null);
export const problem = signal(null);
export const elsewhere = signal([]); // estimates of the same program on every device
export const kernel = signal(null); // the compiled one
export const operation = signal(null);

// What is looked at
export const chosen = signal(0); // program
export const search = signal(0); // scale-up
export const step = signal(0); // of the scale-up
export const listing = signal('source');

export const program = computed(() => story.value?.programs[chosen.value]);
export const longest = (aProgram) => aProgram.kernels.reduce((a, b) => (b.seconds > a.seconds ? b : a));
export const mainKernel = computed(() => program.value && longest(program.value));
export const theme = signal(matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
effect(() => {
  document.documentElement.dataset.theme = theme.value;
});

// The body of kernels:explain and kernels:compile.
export const body = computed(() => {
  const known = constants.value.filter((name) => name in inputs.value);
  return {
    expression: text.value,
    inputs: inputs.value,
    ...(hardware.value ? { hardware: hardware.value } : { target: target.value }),
    ...(known.length && { options: { constants: known } }),
  };
});

// ---------------------------------------------------------------- the address

const inputText = ([name, type]) => `${name}=${type.dtype}[${type.shape.join(',')}]`; // as `roller explain --input`
function readInput(value) {
  const [, name, dtype, shape] = /^(\w+)=(\w+)\[([\d,]*)\]$/.exec(value) ?? [];
  return name && [name, { dtype, shape: shape ? shape.split(',').map(Number) : [] }];
}

function selection() {
  return new URLSearchParams({ program: chosen.value, search: search.value, step: step.value, view: listing.value });
}

export const address = computed(() => {
  const query = new URLSearchParams({ expr: text.value, target: target.value });
  for (const each of Object.entries(inputs.value)) query.append('input', inputText(each));
  for (const name of constants.value) query.append('constant', name);
  for (const [name, factor] of Object.entries(factors.value)) query.append('scale', `${name}=${factor}`);
  for (const [name, value] of selection()) query.append(name, value);
  return kernel.value ? `/k/${kernel.value.digest}?${selection()}` : `/?${query}`;
});

let selected = null; // by the address that was opened, until its story is there
async function openAddress() {
  const query = new URLSearchParams(location.search);
  selected = query.has('program') && ['program', 'search', 'step'].map((name) => Number.parseInt(query.get(name), 10) || 0);
  listing.value = query.get('view') ?? 'source';
  const digest = /^\/k\/(.+)$/.exec(location.pathname)?.[1];
  if (digest) return openKernel(decodeURIComponent(digest));
  if (!query.has('expr')) return open(EXAMPLES[0]);
  const expression = query.get('expr');
  remember(Object.fromEntries(query.getAll('input').map(readInput).filter(Boolean)));
  return open({
    expression,
    inputs: infer(expression),
    target: query.get('target') || EXAMPLES[0].target,
    constants: query.getAll('constant'),
    factors: query.getAll('scale').map(readFactor).filter(Boolean),
  });
}
function readFactor(value) {
  const [name, factor] = value.split('=');
  return Number(factor) > 0 && [name, Number(factor)];
}

async function openKernel(digest) {
  try {
    const path = `/v1/kernels/${encodeURIComponent(digest)}`;
    const [facts, metadata] = await Promise.all([getJson(path), getJson(`${path}/metadata`)]);
    const given = metadata.buffers.filter((buffer) => buffer.role === 'input').map(({ name, dtype, shape }) => [name, { dtype, shape }]);
    batch(() => {
      kernel.value = facts;
      open({ expression: facts.expression, inputs: Object.fromEntries(given), target: facts.target, constants: metadata.constants }, facts);
    });
  } catch (error) {
    report(error);
  }
}

let saving;
effect(() => {
  const next = address.value;
  clearTimeout(saving);
  if (text.value) saving = setTimeout(() => history.replaceState(null, '', next), 150);
});

// ---------------------------------------------------------------- what changes it

export async function open(request, compiled = null) {
  target.value = request.target;
  spec.value = null;
  if (request.factors?.length) await loadSpec().catch(report);
  batch(() => {
    factors.value = Object.fromEntries(request.factors ?? []);
    edited.value = null;
    text.value = request.expression;
    inputs.value = remember(request.inputs);
    constants.value = request.constants ?? [];
    kernel.value = compiled;
    operation.value = null;
  });
  explain();
}

export function edit(changes) {
  batch(() => {
    for (const [one, value] of changes) one.value = value;
    kernel.value = operation.value = null;
  });
  explain();
}
export const setText = (value) => edit([[text, value], [inputs, infer(value)]]);
export const setInput = (name, type) => edit([[inputs, remember({ ...inputs.value, [name]: type })]]);
export const setTarget = (id) => edit([[target, id], [spec, id === target.value ? spec.value : null], [factors, {}], [edited, null]]);
export const setSpec = (value) => edit([[edited, value], [factors, {}]]);
export function setFactor(name, factor) {
  const { [name]: _, ...others } = factors.value;
  edit([[factors, factor === 1 ? others : { ...others, [name]: factor }]]);
}
export async function loadSpec() {
  const id = target.value;
  if (spec.value) return;
  const answer = await getJson(`/v1/hardware/${encodeURIComponent(id)}`);
  if (id === target.value) spec.value = answer;
}
export const setConstant = (name, isConstant) =>
  edit([[constants, isConstant ? [...constants.value, name] : constants.value.filter((each) => each !== name)]]);

export function choose(number) {
  batch(() => {
    chosen.value = number;
    const found = mainKernel.value?.found ?? [];
    const block = found.find(({ search: i }) => story.value.searches[i].level === story.value.device.tile_levels[0]) ?? found[0];
    if (block) look(block.search, block.step);
  });
}

export function look(searchNumber, stepNumber) {
  batch(() => {
    search.value = searchNumber;
    step.value = stepNumber;
  });
}

export function report(error) {
  if (error.name === 'AbortError') return;
  problem.value = error instanceof ProblemError ? error.problem : { detail: error.message, code: 'no-answer', errors: [] };
}

let running = null;
async function explain() {
  running?.abort();
  const own = (running = new AbortController());
  const start = performance.now();
  const asked = body.value;
  try {
    const answer = await post('/v1/kernels:explain', asked, own);
    batch(() => {
      story.value = answer;
      explained.value = asked;
      explainedMs.value = performance.now() - start;
      problem.value = null;
      choose(0);
      restoreSelection();
    });
    await compare(asked, own);
  } catch (error) {
    if (running === own) report(error);
  }
}

function restoreSelection() {
  if (!selected) return;
  const [programNumber, searchNumber, stepNumber] = selected;
  if (programNumber < story.value.programs.length) choose(programNumber);
  if (stepNumber < (story.value.searches[searchNumber]?.steps.length ?? 0)) look(searchNumber, stepNumber);
  selected = null;
}

async function compare({ expression, inputs: given, options }, aborted) {
  await devicesLoaded;
  const ids = devices.value.map((device) => device.id);
  const answer = await post('/v1/estimates', { items: [{ expression, inputs: given }], targets: ids, top_k: 1, ...options }, aborted);
  elsewhere.value = answer.estimates;
}

let devicesLoaded = null;
export function load() {
  devicesLoaded = getJson('/v1/hardware').then((answer) => (devices.value = answer.hardware));
  return Promise.all([devicesLoaded.catch(report), openAddress()]);
}
