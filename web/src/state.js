// What the page shows. The address has all that is needed to show it again.
import { batch, computed, effect, signal } from '@preact/signals';
import { readDigest, readRequest, readSelection, requestQuery } from './address.js';
import { getJson, post } from './api.js';
import { findProgram, measuredOf, programText, requestOf, storyOf } from './built.js';
import { longest } from './calls.js';
import { EXAMPLES } from './examples.js';
import { inferInputs } from './infer.js';
import { ProblemError, isRefusal, problemOf } from './problem.js';
import { fallbacks, resourcesOf, scaled } from './scale.js';

const DTYPE = 'float16'; // of the first input that has no other

// What is asked
export const text = signal('');
export const inputs = signal({}); // name → { dtype, shape }
export const constants = signal([]);
export const outputs = signal(null); // names; null: those that the service takes by itself
export const options = signal({}); // besides the constants
export const target = signal('');
export const spec = signal(null); // of the target, once it is needed
export const factors = signal({}); // resource → factor of the target's own
export const held = signal(null); // the slider that the spec stopped: name and reason
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
export const problem = signal(null); // why it is not explained
export const trouble = signal(''); // what else was not answered
export const waiting = signal(false); // for kernels:explain
export const elsewhere = signal([]); // estimates of a program on every device
const estimated = signal(''); // the program of these estimates
export const kernel = signal(null); // the compiled one
export const built = signal(null); // its program, from the story of its build
export const measured = signal({}); // seconds of the programs that its build has timed, by their texts
export const remark = signal(''); // how the story and the kernel differ
export const operation = signal(null);

// What is looked at
export const chosen = signal(0); // program
export const search = signal(0); // scale-up
export const step = signal(0); // of the scale-up
export const listing = signal('source');
export const line = signal(0); // of the source; 0: none
export const compared = signal(''); // digest of the kernel that the compiled one is compared with

// The number of the compiled program in the story; -1 if it is not in there.
export const builtNumber = computed(() => (story.value && built.value && explained.value === body.value ? findProgram(story.value, built.value) : -1));
export const program = computed(() => story.value?.programs[chosen.value]);
export const mainKernel = computed(() => program.value && longest(program.value));
export const theme = signal(matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
effect(() => {
  document.documentElement.dataset.theme = theme.value;
});

// The body of kernels:explain and kernels:compile.
export const body = computed(() => {
  const known = constants.value.filter((name) => Object.hasOwn(inputs.value, name));
  const all = { ...options.value, ...(known.length && { constants: known }) };
  return {
    expression: text.value,
    inputs: inputs.value,
    ...(hardware.value ? { hardware: hardware.value } : { target: target.value }),
    ...(outputs.value && { outputs: outputs.value }),
    ...(Object.keys(all).length && { options: all }),
  };
});

// ---------------------------------------------------------------- the address

function selection() {
  const other = kernel.value && compared.value ? { compare: compared.value } : {};
  return new URLSearchParams({ program: chosen.value, search: search.value, step: step.value, view: listing.value, ...(kernel.value && line.value && { line: line.value }), ...other });
}

export const address = computed(() => {
  const asked = { expression: text, target, inputs, constants, factors, outputs, options };
  const query = requestQuery(Object.fromEntries(Object.entries(asked).map(([name, { value }]) => [name, value])));
  for (const [name, value] of selection()) query.append(name, value);
  return kernel.value ? `/k/${kernel.value.digest}?${selection()}` : `/?${query}`;
});

let selected = null; // by the address that was opened, until its story is there
async function openAddress() {
  const query = new URLSearchParams(location.search);
  selected = readSelection(query);
  listing.value = query.get('view') ?? 'source';
  line.value = selected.line ?? 0;
  compared.value = query.get('compare') ?? '';
  const digest = readDigest(location.pathname);
  if (digest) return openKernel(digest);
  if (!query.has('expr')) return open(EXAMPLES[0]);
  const { types, ...request } = readRequest(query);
  remember(types);
  return open({ ...request, inputs: infer(request.expression), target: request.target || EXAMPLES[0].target });
}

const NO_REQUEST = 'This kernel does not say how it was built, so its tiles cannot be explained.';
const BY_HAND = 'This kernel was built by a schedule by hand: no tiles were searched.';
const OF_THE_BUILD = 'What is shown is from the build of this kernel: a search of today does not give its program.';

// A kernel is shown with the story of its build, until the service has explained the same request again.
async function openKernel(digest) {
  try {
    const path = `/v1/kernels/${encodeURIComponent(digest)}`;
    const [facts, report] = await Promise.all([getJson(path), readReport(path)]);
    const request = requestOf(report), told = storyOf(report, facts);
    if (!request || !told) {
      batch(() => {
        kernel.value = facts;
        remark.value = request ? BY_HAND : NO_REQUEST;
      });
      return;
    }
    const { constants: fixed, candidate: _, ...others } = request.options; // what is chosen says which candidate it is
    batch(() => {
      story.value = told.story;
      measured.value = measuredOf(report);
      built.value = told.story.programs[told.number];
      choose(told.number);
      restoreSelection();
      open({ ...request, target: facts.target, constants: fixed, options: others, spec: request.hardware }, facts);
      explained.value = body.value;
    });
  } catch (error) {
    problem.value = problemOf(error);
  }
}

// The report of a kernel; null of one that has none.
export async function readReport(path) {
  try {
    return await getJson(`${path}/report`);
  } catch (error) {
    if (error instanceof ProblemError && error.problem.code === 'unknown-artifact') return null;
    throw error;
  }
}

// A compiled kernel, and which program it is.
export async function showKernel(facts, isCurrent) {
  const report = await readReport(`/v1/kernels/${encodeURIComponent(facts.digest)}`), told = storyOf(report, facts);
  const own = told && told.story.programs[told.number];
  if (!isCurrent()) return;
  batch(() => {
    kernel.value = facts;
    built.value = own;
    // The report is of the first build of these bytes; this one may have timed them.
    const timed = own && facts.measurement ? { [programText(own)]: facts.measurement.median_s } : {};
    measured.value = { ...measured.value, ...measuredOf(report), ...timed };
  });
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
  if (Object.keys(request.factors ?? {}).length) await loadSpec();
  batch(() => {
    factors.value = knownFactors(request.factors ?? {});
    held.value = null;
    edited.value = request.spec ?? null;
    outputs.value = request.outputs ?? null;
    options.value = request.options ?? {};
    text.value = request.expression;
    inputs.value = remember(request.inputs);
    constants.value = request.constants ?? [];
    kernel.value = compiled;
    if (!compiled) forgetBuild();
    remark.value = '';
    operation.value = null;
  });
  explain();
  const unknown = Object.keys(request.factors ?? {}).filter((name) => !Object.hasOwn(factors.value, name));
  if (unknown.length && spec.value) trouble.value = `scale: the device has no ${unknown.join(', no ')}; it has ${Object.keys(resourcesOf(spec.value)).join(', ')}`;
}

function forgetBuild() {
  line.value = 0;
  built.value = null;
  measured.value = {};
}

function knownFactors(asked) {
  const known = spec.value ? resourcesOf(spec.value) : {};
  return Object.fromEntries(Object.entries(asked).filter(([name]) => Object.hasOwn(known, name)));
}

export function edit(changes) {
  batch(() => {
    held.value = null;
    for (const [one, value] of changes) one.value = value;
    kernel.value = operation.value = null;
    forgetBuild();
    remark.value = '';
  });
  explain();
}
export const setText = (value) => edit([[text, value], [inputs, infer(value)], [outputs, null]]);
export const dropOptions = () => edit([[options, {}], [outputs, null]]);
export const setInput = (name, type) => edit([[inputs, remember({ ...inputs.value, [name]: type })]]);
export const setTarget = (id) => edit([[target, id], [spec, id === target.value ? spec.value : null], [factors, {}], [edited, null]]);
export const setSpec = (value) => edit([[edited, value], [factors, {}]]);
// Fields of a spec are checked against each other: a slider stops at the last position that the service accepts.
let moves = 0; // of sliders; the last counts
export async function setFactor(name, wanted) {
  const { [name]: _, ...others } = factors.value, base = edited.value ?? spec.value, id = target.value, own = ++moves;
  let reason = null, changed = others;
  for (const factor of fallbacks(wanted)) {
    changed = factor === 1 ? others : { ...others, [name]: factor };
    const refused = factor === 1 ? null : await refusalOf(scaled(base, changed));
    if (own !== moves || id !== target.value) return;
    if (!refused) break;
    reason ??= refused;
  }
  edit([[factors, changed], [held, reason && { name, reason }]]);
}

// Why the service refuses a spec; null if it accepts it or does not answer.
async function refusalOf(hardware) {
  try {
    await post('/v1/hardware:validate', { hardware });
    return null;
  } catch (error) {
    const { status, detail, errors } = problemOf(error);
    return status === 422 ? (errors[0]?.message ?? detail) : null;
  }
}
export async function loadSpec() {
  const id = target.value;
  if (spec.value || edited.value) return;
  try {
    const answer = await getJson(`/v1/hardware/${encodeURIComponent(id)}`);
    if (id === target.value) spec.value = answer;
  } catch (error) {
    say(`spec of ${id}`)(error);
  }
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

export const isFault = computed(() => isRefusal(problem.value));
// What is compiled is what was explained, or would be if the service had answered.
export const canCompile = computed(() => !waiting.value && !!text.value && (problem.value ? !isFault.value : explained.value === body.value));

const say = (what) => (error) => {
  if (error.name !== 'AbortError') trouble.value = `${what}: ${error.message}`;
};

let running = null;
export async function explain() {
  running?.abort();
  const own = (running = new AbortController());
  const start = performance.now();
  const asked = body.value;
  waiting.value = true;
  trouble.value = '';
  try {
    const answer = await post('/v1/kernels:explain', asked, own);
    batch(() => {
      explained.value = asked;
      problem.value = null;
      waiting.value = false;
      if (built.value && findProgram(answer, built.value) < 0) {
        remark.value = OF_THE_BUILD;
        return;
      }
      story.value = answer;
      explainedMs.value = performance.now() - start;
      choose(Math.max(0, builtNumber.value));
      restoreSelection();
    });
    selected = null;
  } catch (error) {
    if (running !== own) return;
    batch(() => {
      problem.value = problemOf(error);
      waiting.value = false;
      if (built.value) remark.value = OF_THE_BUILD;
    });
    return;
  }
  await compare(asked, own).catch(say('other devices'));
}

function restoreSelection() {
  if (!selected) return;
  if (selected.program !== null && selected.program < story.value.programs.length) choose(selected.program);
  if (selected.search === null && selected.step === null) return;
  const [searchNumber, stepNumber] = [selected.search ?? search.value, selected.step ?? 0];
  if (stepNumber < (story.value.searches[searchNumber]?.steps.length ?? 0)) look(searchNumber, stepNumber);
}

// Options of estimates; the others are of builds.
const ESTIMATED = ['allow_tf32', 'allow_expanded_squares', 'winograd', 'donate', 'constants'];

function estimateOf({ expression, inputs: given, outputs: wanted, options: all = {} }) {
  const own = Object.fromEntries(Object.entries(all).filter(([name]) => ESTIMATED.includes(name)));
  return { items: [{ expression, inputs: given, ...(wanted && { outputs: wanted }) }], top_k: 1, ...own };
}
// Whether the estimates are of another program than the text.
export const isElsewhereOld = computed(() => estimated.value !== JSON.stringify(estimateOf(body.value)));

async function compare(asked, aborted) {
  await devicesLoaded;
  const request = estimateOf(asked);
  const answer = await post('/v1/estimates', { ...request, targets: devices.value.map((device) => device.id) }, aborted);
  batch(() => {
    elsewhere.value = answer.estimates;
    estimated.value = JSON.stringify(request);
  });
}

let devicesLoaded = null;
export function load() {
  devicesLoaded = getJson('/v1/hardware').then((answer) => (devices.value = answer.hardware));
  return Promise.all([devicesLoaded.catch(say('devices')), openAddress()]);
}
