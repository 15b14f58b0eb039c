import { html } from 'htm/preact';
import { getJson, post } from './api.js';
import { problemOf } from './problem.js';
import * as state from './state.js';

const WAIT_S = 10; // of one request for the operation

// The chosen program: the first is what the model takes by itself.
function requested() {
  const body = state.body.peek(), number = state.problem.peek() ? 0 : state.chosen.peek();
  return number > 0 ? { ...body, options: { ...body.options, candidate: number + 1 } } : body;
}

async function compile(how) {
  const asked = state.body.peek(), isCurrent = () => asked === state.body.peek();
  try {
    let operation = await post(`/v1/kernels:${how}`, requested());
    while (isCurrent()) {
      state.operation.value = operation;
      if (operation.done) break;
      operation = await getJson(`/v1/${operation.name}?wait=${WAIT_S}`);
    }
    if (isCurrent() && operation.response) await state.showKernel(operation.response, isCurrent);
  } catch (error) {
    if (isCurrent()) state.operation.value = { done: true, error: problemOf(error) };
  }
}

function stateOf(operation) {
  if (!operation) return '';
  if (operation.error) return `failed: ${operation.error.detail}`;
  const { stage, cache, queue_position: position, waiting_for: queue } = operation.metadata;
  if (operation.done) return cache === 'hit' ? 'compiled before' : 'compiled';
  if (queue) return `no worker takes from ${queue}`;
  return position > 0 ? `queued behind ${position}` : stage;
}

export function Compile() {
  const operation = state.operation.value, isRunning = operation && !operation.done, number = state.problem.value ? 0 : state.chosen.value;
  return html`<div class="compile">
    <button data-testid="compile" disabled=${!state.canCompile.value || isRunning} onClick=${() => compile('compile')}>Compile${number > 0 ? ` program ${number + 1}` : ''}</button>
    <button data-testid="measure" class="second" title="compile it, and time it on a worker that has the device" disabled=${!state.canCompile.value || isRunning} onClick=${() => compile('measure')}>Measure</button>
    <span data-testid="status" role="status" class=${operation?.error ? 'bad' : 'quiet'}>${isRunning && html`<i class="busy"></i>`}${stateOf(operation)}</span>
  </div>`;
}
