// The kernel's text, its machine code, and code that launches it.
import { html } from 'htm/preact';
import { signal } from '@preact/signals';
import { useState } from 'preact/hooks';
import * as f from './format.js';
import { launchCodes } from './launch.js';
import * as state from './state.js';

function Launch() {
  const [name, setName] = useState('python'), [copied, setCopied] = useState(false);
  const codes = launchCodes(state.body.value, state.kernel.value), code = codes[name] ?? codes.python;
  const copy = async () => {
    await navigator.clipboard.writeText(code);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<div class="launch"><h3>Use it</h3>
    <div class="choices">${Object.keys(codes).map((each) => html`<button aria-pressed=${each === name} onClick=${() => setName(each)}>${each}</button>`)}<button onClick=${copy}>${copied ? 'copied' : 'copy'}</button></div>
    <pre data-testid="launch-code" tabindex="0">${code}</pre></div>`;
}

// Texts are read once there is a kernel: their code comes then.
const later = signal(null);
const load = () => Promise.all([import('./code.js'), import('./compare.js')]).then(([{ Code }, { Compare }]) => (later.value = { Code, Compare }));

function Texts({ kernel }) {
  const parts = later.value;
  if (!parts) return void load();
  return html`<${parts.Code} kernel=${kernel} /><${parts.Compare} kernel=${kernel} />`;
}

function Compiled({ kernel }) {
  const [resources] = kernel.resources, [launch] = kernel.launches;
  const facts = [
    launch && `${f.plural(kernel.launches.length, 'launch').replace('launchs', 'launches')}`,
    kernel.language !== 'c' && launch && `grid ${launch.grid.join('×')}, block ${launch.block.join('×')}`,
    resources?.registers_per_thread > 0 && `${resources.registers_per_thread} registers`,
    resources?.shared_bytes > 0 && `${f.bytes(resources.shared_bytes)} shared`,
    resources?.spill_bytes > 0 && `spills ${f.bytes(resources.spill_bytes)}`,
  ].filter(Boolean);
  return html`<p class="quiet">${facts.join(' · ')} · <a class="mono" href=${`/k/${kernel.digest}`}>${kernel.digest.slice(0, 19)}</a></p>
    ${state.story.value && state.builtNumber.value < 0 && html`<p class="note">The kernel is none of the programs above.</p>`}
    ${kernel.notes.map((note) => html`<p class="note">${note}</p>`)}
    <${Texts} kernel=${kernel} />`;
}

export function Text() {
  const kernel = state.kernel.value;
  return html`<section class="panel" aria-labelledby="text-title"><header><h2 id="text-title">Kernel</h2></header>
    ${kernel ? html`<${Compiled} kernel=${kernel} />` : html`<p class="quiet">Not compiled: all of the above is the model's word. Compile builds the chosen program.</p>`}
    ${state.text.value && html`<${Launch} />`}</section>`;
}
