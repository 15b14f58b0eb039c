// The page of a model on a service: /m/DIGEST shows a story, /m compiles a file.
import { html } from 'htm/preact';
import { useState } from 'preact/hooks';
import { computed, effect, signal } from '@preact/signals';
import { findDigest, readChoice, readDigest } from './address.js';
import { getJson, post, put } from './api.js';
import { ComparePlans } from './compareplans.js';
import { EditPlan } from './editplan.js';
import { ModelView } from './model.js';
import { bucket, chooseBucket, compared, model, picked, show, stories } from './modelstate.js';
import { problemOf } from './problem.js';

const WAIT_S = 10; // of one request for the operation
const digest = signal(null);
const problem = signal(null);
const stage = signal('');
const devices = signal([]);

export const address = computed(() => {
  if (!digest.value) return '/m';
  const choice = [['bucket', bucket.value || null], ['node', picked.value], ['compare', compared.value || null]].filter(([, value]) => value !== null);
  return `/m/${digest.value}${choice.length ? `?${new URLSearchParams(choice)}` : ''}`;
});

async function readStory() {
  show(await getJson(`/v1/models/${encodeURIComponent(digest.value)}/story`));
  const query = new URLSearchParams(location.search), choice = readChoice(query);
  compared.value = findDigest(query.get('compare') ?? '') ?? '';
  if (choice.bucket !== null && !stories.value[choice.bucket]) return; // the node is of another graph
  if (choice.bucket) chooseBucket(choice.bucket);
  if (choice.node !== null && choice.node < model.value.story.nodes.length) picked.value = choice.node;
}
const readDevices = async () => (devices.value = (await getJson('/v1/hardware')).hardware);

// Reads what the page shows: a model, or the devices of the form. It is called again with a key.
export async function load() {
  digest.value = readDigest(location.pathname);
  problem.value = null;
  const fail = (error) => (problem.value = problemOf(error));
  if (digest.value) await readStory().catch(fail);
  if (!model.value) await readDevices().catch(fail);
}

let saving;
effect(() => {
  const next = address.value;
  clearTimeout(saving);
  if (model.value) saving = setTimeout(() => history.replaceState(null, '', next), 150);
});

const hex = (bytes) => [...new Uint8Array(bytes)].map((each) => each.toString(16).padStart(2, '0')).join('');

// Browsers hash for pages by https and of localhost alone; for others our own code does, more slowly.
async function hash(content) {
  if (crypto.subtle) return crypto.subtle.digest('SHA-256', content);
  const { sha256 } = await import('@noble/hashes/sha2.js');
  return sha256(new Uint8Array(content));
}

// A file is a blob of the service, or a graph as JSON, which is part of the request.
async function sourceOf(file) {
  if (/\.json$/i.test(file.name)) return { graph: JSON.parse(await file.text()) };
  const content = await file.arrayBuffer(), blob = `sha256:${hex(await hash(content))}`;
  await put(`/v1/blobs/${blob}`, content);
  return { blob };
}

async function compile(event) {
  event.preventDefault();
  const given = new FormData(event.currentTarget), file = given.get('file'), plan = given.get('plan');
  try {
    problem.value = null;
    stage.value = 'reading';
    const source = await sourceOf(file);
    let operation = await post('/v1/graphs:compile', { model: source, target: given.get('target'), options: { plan } });
    while (!operation.done) {
      stage.value = operation.metadata.waiting_for ? `no worker takes from ${operation.metadata.waiting_for}` : operation.metadata.stage;
      operation = await getJson(`/v1/${operation.name}?wait=${WAIT_S}`);
    }
    stage.value = '';
    if (operation.error) {
      problem.value = operation.error;
      return;
    }
    location.assign(`/m/${operation.response.digest}`); // so that Back returns to the form
  } catch (error) {
    stage.value = '';
    problem.value = error instanceof SyntaxError ? { detail: `${file.name} is no JSON: ${error.message}` } : problemOf(error);
  }
}

const PLANS = { cpu: ['auto', 'serial', 'parallel', 'rammer'], cuda: ['auto', 'launches', 'graph', 'waves', 'persistent'], amd: ['auto', 'launches'] };

function Open() {
  const [target, setTarget] = useState('local'), family = devices.value.find((each) => each.id === target)?.family ?? 'cpu';
  return html`<section class="panel open"><h2>Open a model</h2>
    <form onSubmit=${compile}>
      <label>ONNX file or JSON graph <input type="file" name="file" required accept=".onnx,.json" data-testid="model-file" /></label>
      <label>device <select name="target" value=${target} onChange=${(event) => setTarget(event.target.value)}><option value="local">the service's own CPU</option>${devices.value.filter((each) => each.id !== 'local').map((each) => html`<option value=${each.id}>${each.name ?? each.id}</option>`)}</select></label>
      <label>plan <select name="plan">${(PLANS[family] ?? PLANS.amd).map((each) => html`<option>${each}</option>`)}</select></label>
      <button data-testid="compile" disabled=${!!stage.value}>Compile</button>
      <span role="status" class="quiet" data-testid="status">${stage.value && html`<i class="busy"></i>`}${stage.value}</span>
    </form>
    <p class="quiet">The service compiles it, and keeps it under a link of its own.</p></section>`;
}

const Problem = () => html`<p class="note bad" role="alert" data-testid="problem">${problem.value.detail}</p>
  ${problem.value.nodes && html`<ul class="quiet">${problem.value.nodes.slice(0, 20).map((each) => html`<li>${each.operator} ${each.name}: ${each.reason}</li>`)}</ul>`}`;

const hasCores = () => model.value.story.instructions.some((each) => each.kind === 'execute');
const Beside = () => html`${hasCores() && html`<${EditPlan} digest=${digest.value} />`}<${ComparePlans} />`;

export const Page = () => html`<main class="model work"><h1 class="unseen">When each core does what</h1>
  ${problem.value && html`<${Problem} />`}
  ${model.value ? html`<${ModelView} /><${Beside} />` : digest.value && !problem.value ? html`<p class="waiting" role="status">Reading the model…</p>` : html`<${Open} />`}</main>`;
