// The left column: text, inputs, devices.
import { html } from 'htm/preact';
import { useEffect, useRef } from 'preact/hooks';
import { Compile } from './compile.js';
import { tone } from './colours.js';
import { EXAMPLES } from './examples.js';
import * as f from './format.js';
import { Spec } from './spec.js';
import * as state from './state.js';

const PAUSE_MS = 180; // in typing

const TYPES = [
  'float32', 'float16', 'bfloat16', 'float64', 'float8_e4m3', 'float8_e5m2',
  'int8', 'uint8', 'int16', 'int32', 'int64', 'bool',
];

function Editor() {
  const box = useRef(), editor = useRef(), typed = useRef();
  useEffect(() => {
    let timer, isGone = false;
    import('./editor.js').then(({ createEditor }) => {
      if (isGone) return; // the first paint does not wait for the editor
      const changed = (text) => {
        clearTimeout(timer);
        timer = setTimeout(() => state.setText((typed.current = text)), PAUSE_MS);
      };
      box.current.textContent = '';
      editor.current = createEditor(box.current, state.text.peek(), changed);
      editor.current.mark(state.problem.peek()?.errors ?? []);
    });
    return () => {
      isGone = true;
      editor.current?.destroy();
    };
  }, []);
  const text = state.text.value, problem = state.problem.value;
  useEffect(() => {
    if (text !== typed.current) editor.current?.show(text); // what was typed may have grown since
  }, [text]);
  useEffect(() => editor.current?.mark(problem?.errors ?? []), [problem]);
  return html`<div class=${problem?.errors.some((error) => error.line) ? 'editor wrong' : 'editor'} ref=${box}><pre>${state.text.peek()}</pre></div>`;
}

function Diagnostics() {
  const problem = state.problem.value, took = state.explainedMs.value;
  const errors = problem?.errors.length ? problem.errors : problem ? [{ message: problem.detail }] : [];
  return html`<div class="diagnostics" data-testid="diagnostics" role="status">
    ${errors.map((error) => html`<p><b>${error.line ? `${error.line}:${error.column}` : where(error.pointer) ?? problem.code}</b> ${error.message}
      ${error.hint && html`<span>${error.hint}</span>`}</p>`)}
    ${problem && !state.isFault.value && html`<p><button data-testid="again" onClick=${state.explain}>ask again</button></p>`}
    ${state.trouble.value && html`<p class="bad" data-testid="trouble">${state.trouble.value}</p>`}
    ${state.waiting.value && html`<p class="quiet">explaining…</p>`}
    ${!problem && !state.waiting.value && took != null && html`<p class="quiet">explained in ${Math.round(took)} ms</p>`}
  </div>`;
}
const where = (pointer) => pointer?.replace(/^\/inputs\//, '').replaceAll('/', ' ');

const readShape = (text) => (text.trim() ? text.split(/[^\d]+/).filter(Boolean).map(Number) : []);

function Inputs() {
  const entries = Object.entries(state.inputs.value);
  if (!entries.length) return null;
  return html`<table class="inputs"><caption class="unseen">Inputs</caption>
    <thead><tr><th>input</th><th>type</th><th>shape</th><th title="does not change from call to call, such as weights">fixed</th></tr></thead>
    <tbody>${entries.map(([name, { dtype, shape }]) => html`<tr key=${name}>
      <th scope="row">${name}</th>
      <td><select aria-label=${`type of ${name}`} value=${dtype} onChange=${(e) => state.setInput(name, { dtype: e.target.value, shape })}>
        ${[...new Set([...TYPES, dtype])].map((type) => html`<option selected=${type === dtype}>${type}</option>`)}</select></td>
      <td><input aria-label=${`shape of ${name}`} value=${shape.join(' × ')} inputmode="numeric"
        onChange=${(e) => state.setInput(name, { dtype, shape: readShape(e.target.value) })} /></td>
      <td><input type="checkbox" aria-label=${`${name} is constant`} checked=${state.constants.value.includes(name)}
        onChange=${(e) => state.setConstant(name, e.target.checked)} /></td>
    </tr>`)}</tbody></table>`;
}

// Options of a kernel that was built by another client, or of a link.
function Options() {
  const given = { ...(state.outputs.value && { outputs: state.outputs.value }), ...state.options.value };
  if (!Object.keys(given).length) return null;
  return html`<p class="quiet" data-testid="options">${Object.entries(given).map(([name, value]) => `${name} ${typeof value === 'string' ? value : JSON.stringify(value)}`).join(' · ')}
    <button onClick=${state.dropOptions}>without</button></p>`;
}

function Device() {
  const device = state.story.value?.device;
  if (!device) return null;
  return html`<section class="device"><h2>${device.name}</h2>
    <p class="quiet">${f.plural(device.cores, 'core')} · ${device.levels
      .filter((level) => level.name !== device.tile_levels[1])
      .map((level) => html`<span style=${`color:${tone(device, level.name)}`}>${level.name} ${f.rate(level.bandwidth_bytes_per_s, 'B')}${level.assumed ? '?' : ''}</span> `)}</p></section>`;
}

function rowOf(estimate) {
  const best = estimate.candidates?.[0];
  if (!best) return { target: estimate.target, refused: estimate.error?.detail ?? 'no candidate' };
  return { target: estimate.target, seconds: best.seconds, bound: best.bound, floor: estimate.floor.seconds };
}

const LONGEST_BAR = 8; // times the fastest device: bars beyond it are cut

// The same program on every device; a click makes one the target.
function Elsewhere() {
  const named = state.elsewhere.value.map(rowOf), isOld = named.length > 0 && state.isElsewhereOld.value;
  const rows = named.length ? named : state.devices.value.map((device) => ({ target: device.id }));
  rows.sort((a, b) => (a.seconds ?? Infinity) - (b.seconds ?? Infinity));
  const most = LONGEST_BAR * (rows[0]?.seconds ?? 1), longest = Math.min(most, Math.max(...rows.map((row) => row.seconds ?? 0)));
  const width = (seconds) => `${Math.min(100, (100 * seconds) / longest)}%`;
  return html`<section class="elsewhere" data-testid="target"><h2>Devices</h2>
    ${rows.map((row) => html`<button key=${row.target} data-testid=${`target-${row.target}`} class=${row.target === state.target.value ? 'on' : ''}
      aria-pressed=${row.target === state.target.value} title=${isOld ? 'estimating' : row.refused ?? `bound by ${row.bound}`} onClick=${() => state.setTarget(row.target)}>
      <span>${f.device(row.target)}</span>
      ${isOld ? html`<small></small><em>…</em>` : row.seconds ? html`<svg height="10" width="100%" aria-hidden="true">
          <rect width=${width(row.seconds)} height="10" class=${row.seconds > longest ? 'estimate cut' : 'estimate'} />
          <rect width=${width(row.floor)} height="10" class="floor" /></svg><em>${f.time(row.seconds)}</em>` : html`<small>${row.refused ? 'refused' : ''}</small><em></em>`}
    </button>`)}
    ${named.length > 0 && html`<p class="quiet">Dark: no tiles go below this on the device.</p>`}</section>`;
}

export function Desk() {
  const now = EXAMPLES.findIndex((example) => example.expression === state.text.value && example.target === state.target.value
    && JSON.stringify(example.inputs) === JSON.stringify(state.inputs.value));
  return html`<aside class="desk" aria-label="Program">
    <select class="examples" aria-label="example" value=${now} onChange=${(e) => state.open(EXAMPLES[e.target.value])}>
      ${now < 0 && html`<option value="-1" selected>examples…</option>`}
      ${EXAMPLES.map((example, i) => html`<option value=${i} selected=${i === now}>${example.name}</option>`)}</select>
    <${Editor} /><${Diagnostics} /><${Inputs} /><${Options} /><${Compile} /><${Device} /><${Spec} /><${Elsewhere} />
  </aside>`;
}
