import { html } from 'htm/preact';
import { getJson, post } from './api.js';
import { problemOf } from './problem.js';
import * as state from './state.js';

const WAIT_S = 10; // of one request for the operation

async function compile() {
  const asked = state.body.peek(), isCurrent = () => asked === state.body.peek();
  try {
    let operation = await post('/v1/kernels:compile', asked);
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
  const operation = state.operation.value, isRunning = operation && !operation.done;
  return html`<div class="compile">
    <button data-testid="compile" disabled=${!state.canCompile.value || isRunning} onClick=${compile}>Compile</button>
    <span data-testid="status" role="status" class=${operation?.error ? 'bad' : 'quiet'}>${isRunning && html`<i class="busy"></i>`}${stateOf(operation)}</span>
  </div>`;
}
