// The build farm as it is now: figures, and each operation as a life line. The service sends what changes.
import { html } from 'htm/preact';
import { signal } from '@preact/signals';
import { getJson, stream } from './api.js';
import * as f from './format.js';
import { problemOf } from './problem.js';

const MOST = 200; // operations that are kept
const RETRY_MS = 2000;
const figures = signal(null);
const operations = signal(new Map());
const problem = signal(null);
const live = signal(false);
const filter = signal('all');
const opened = signal(null);
const now = signal(Date.now());

export const address = signal('/farm');

const stamp = (time) => (time ? Date.parse(time) : null);
const createdAt = ({ metadata }) => stamp(metadata.create_time);

function keep(listed) {
  const all = new Map(operations.value);
  for (const each of listed) all.set(each.name, each);
  const sorted = [...all.values()].sort((a, b) => createdAt(b) - createdAt(a)).slice(0, MOST);
  operations.value = new Map(sorted.map((each) => [each.name, each]));
}

const TAKE = {
  figures: (value) => (figures.value = value),
  operation: (value) => keep([value]),
};

export async function load() {
  setInterval(() => (now.value = Date.now()), 1000);
  let last = '';
  for (;;) {
    try {
      const [known, { operations: listed }] = await Promise.all([getJson('/v1/farm'), getJson('/v1/operations?page_size=100')]);
      figures.value = known;
      keep(listed);
      problem.value = null;
      live.value = true;
      await stream('/v1/farm/events', last, ({ id, event, data }) => {
        last = id || last;
        if (data && Object.hasOwn(TAKE, event)) TAKE[event](JSON.parse(data));
      });
    } catch (error) {
      problem.value = problemOf(error);
    }
    live.value = false;
    if ([401, 403].includes(problem.value?.status)) return; // a key is asked for
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

const stateOf = (operation) => (operation.error ? 'failed' : operation.done ? 'done' : operation.metadata.stage);
const targetOf = ({ request }) => request?.target ?? '';
const titleOf = ({ request, name }) => request?.expression ?? (request?.model ? `model ${request.model.slice(0, 19)}` : name);

// When an operation waited and was built, in ms; null where it has not come to that.
function lifeOf(operation) {
  const { metadata, done } = operation, created = createdAt(operation), end = stamp(metadata.end_time) ?? (done ? created : now.value);
  const start = stamp(metadata.start_time);
  return { created, start, end: Math.max(end, created), waited: (start ?? end) - created, built: start === null ? null : end - start };
}

function Line({ operation, first, last }) {
  const { created, start, end } = lifeOf(operation), x = (time) => (100 * (time - first)) / Math.max(1, last - first);
  const state = stateOf(operation), colour = { failed: 'var(--bad)', done: 'var(--block)' }[state] ?? 'var(--between)';
  return html`<svg width="100%" height="12" aria-hidden="true">
    <rect x=${`${x(created)}%`} y="5" height="2" width=${`${Math.max(0.3, x(start ?? end) - x(created))}%`} style="fill:var(--exposed)" />
    ${start !== null && html`<rect x=${`${x(start)}%`} y="2" height="8" width=${`${Math.max(0.6, x(end) - x(start))}%`} style=${`fill:${colour}`} />`}</svg>`;
}

const NEXT = {
  'toolchain-missing': 'Install the compiler on a worker, or start a worker that has it.',
  'no-worker': 'Start a worker that takes from this queue.',
  'deadline-exceeded': 'Raise ROLLER_BUILD_TIMEOUT_S, or ask for fewer candidates.',
  'operation-cancelled': 'Ask again to build it.',
  'out-of-memory': 'Give workers more memory: ROLLER_WORKER_MEMORY_BYTES.',
};

function Failure({ operation }) {
  const { detail, code, errors = [] } = operation.error;
  return html`<div class="failure"><p class="bad">${detail} <code>${code}</code></p>
    ${errors.slice(0, 8).map((each) => html`<p class="mono break">${each.message}${each.hint ? html` <span class="quiet">${each.hint}</span>` : ''}</p>`)}
    ${Object.hasOwn(NEXT, code) && html`<p>${NEXT[code]}</p>`}</div>`;
}

// Why a request was not a hit: what of its key differs from the nearest stored one.
const reasons = signal(new Map());
async function explainMiss({ name, metadata }) {
  if (reasons.value.has(name) || !metadata.action) return;
  const say = (value) => (reasons.value = new Map(reasons.value).set(name, value));
  try {
    const { nearest } = await getJson(`/v1/actions/${encodeURIComponent(metadata.action)}`);
    const parts = (nearest?.differences ?? []).map(({ part, fields }) => `${part} (${fields.slice(0, 3).map((each) => each.field).join(', ')})`);
    if (nearest) say(`It was no hit: the nearest stored result differs in ${parts.join(', ')}.`);
  } catch (error) {
    say(problemOf(error).detail);
  }
}

function Result({ response, isModel }) {
  if (!isModel) return html`<a href=${`/k/${response.digest}`}>open the kernel</a>`;
  if (response.subgraphs?.length) return html`<span class="quiet">a model over several devices, which has no story</span>`;
  return html`<a href=${`/m/${response.digest}`}>open the model</a>`;
}

function Detail({ operation }) {
  const { response, metadata, request } = operation;
  return html`<tr class="detail"><td colspan="6"><pre tabindex="0">${titleOf(operation)}</pre>
    ${operation.error && html`<${Failure} operation=${operation} />`}
    <p class="quiet">${operation.name} · ${metadata.cache ?? ''} · asked ${metadata.create_time}${metadata.waiting_for ? ` · no worker takes from ${metadata.waiting_for}` : ''}</p>
    ${reasons.value.get(operation.name) && html`<p class="quiet">${reasons.value.get(operation.name)}</p>`}
    ${response && html`<p><${Result} response=${response} isModel=${!!request?.model} /></p>`}</td></tr>`;
}

function open(operation) {
  opened.value = opened.value === operation.name ? null : operation.name;
  if (opened.value) explainMiss(operation);
}

const Figure = ({ name, value, more }) => html`<div><dt>${name}</dt><dd><b class="big">${value}</b><small>${more}</small></dd></div>`;
const seconds = (value) => (value == null ? '–' : f.time(value));

function Figures() {
  const { workers, ended, wait_s: wait, build_s: build, submissions, queues } = figures.value;
  const { hit = 0, miss = 0, joined = 0 } = submissions, asked = hit + miss + joined, failed = Object.entries(ended).filter(([code]) => code !== 'ok');
  const queued = queues.reduce((sum, each) => sum + each.operations, 0);
  return html`<section class="panel" data-testid="farm" aria-label="figures"><dl class="figures">
    <${Figure} name="hit rate" value=${asked ? f.percent(hit / asked) : '–'} more=${`${f.plural(hit, 'hit')}, ${f.plural(miss, 'build')}, ${f.count(joined)} joined`} />
    <${Figure} name="wait, median" value=${seconds(wait['0.5'])} more=${`95 %: ${seconds(wait['0.95'])}`} />
    <${Figure} name="build, median" value=${seconds(build['0.5'])} more=${`95 %: ${seconds(build['0.95'])}`} />
    <${Figure} name="workers" value=${f.count(Object.values(workers).reduce((sum, each) => sum + each, 0))} more=${Object.entries(workers).map(([state, number]) => `${number} ${state}`).join(', ') || 'none is alive'} />
    <${Figure} name="queued and building" value=${f.count(queued)} more=${queues.map((each) => `${each.queue} ${each.state} ${each.operations}`).join(', ') || 'nothing waits'} />
    <${Figure} name="failed" value=${f.count(failed.reduce((sum, [, number]) => sum + number, 0))} more=${failed.map(([code, number]) => `${code} ${number}`).join(', ') || 'in the last minutes'} /></dl></section>`;
}

function Operations() {
  const all = [...operations.value.values()], targets = [...new Set(all.map(targetOf).filter(Boolean))];
  const shown = all.filter((each) => filter.value === 'all' || (filter.value === 'failed' ? each.error : targetOf(each) === filter.value));
  const lives = shown.map(lifeOf), first = Math.min(...lives.map((each) => each.created)), last = Math.max(...lives.map((each) => each.end));
  return html`<section class="panel" aria-labelledby="operations-title"><header><h2 id="operations-title">Operations</h2>
      <span class="choices">${['all', 'failed', ...targets].map((each) => html`<button aria-pressed=${filter.value === each} onClick=${() => (filter.value = each)}>${f.device(each)}</button>`)}</span>
      <span class="quiet">${live.value ? 'live' : 'not connected'}${shown.length ? ` · ${f.time((last - first) / 1000)} in all: thin waits, thick builds` : ''}</span></header>
    ${shown.length === 0 && html`<p class="quiet">No operations: hits are not listed.</p>`}
    ${shown.length > 0 && html`<div class="scroll" tabindex="0" role="group" aria-label="table of operations"><table class="programs lives" data-testid="operations">
      <thead><tr><th>asked for</th><th>device</th><th class="wide">life</th><th class="r">waited</th><th class="r">built</th><th>state</th></tr></thead>
      <tbody>${shown.map((each, i) => html`<tr key=${each.name} onClick=${() => open(each)}>
        <td class="mono cut"><button class="plain" aria-expanded=${opened.value === each.name}>${titleOf(each)}</button></td><td>${f.device(targetOf(each))}</td>
        <td class="wide"><${Line} operation=${each} first=${first} last=${last} /></td>
        <td class="r">${f.time(lives[i].waited / 1000)}</td><td class="r">${lives[i].built === null ? '–' : f.time(lives[i].built / 1000)}</td>
        <td class=${each.error ? 'bad' : ''}>${each.error ? each.error.code : stateOf(each)}</td></tr>
        ${opened.value === each.name && html`<${Detail} operation=${each} />`}`)}</tbody></table></div>`}</section>`;
}

export const Page = () => html`<main class="farm work"><h1 class="unseen">The build farm</h1>
  ${problem.value && html`<p class="note bad" role="alert" data-testid="problem">${problem.value.detail}</p>`}
  ${figures.value ? html`<${Figures} /><${Operations} />` : !problem.value && html`<p class="waiting" role="status">Reading the farm…</p>`}</main>`;
