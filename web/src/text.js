// The kernel's text, its machine code, and code that launches it.
import { html } from 'htm/preact';
import { useEffect, useState } from 'preact/hooks';
import { getText } from './api.js';
import { Compare } from './compare.js';
import * as f from './format.js';
import { launchCodes } from './launch.js';
import * as state from './state.js';

const TOKEN = /(\/\/.*$|\/\*.*?\*\/|"[^"]*"|#\s*\w+|\b\d[\w.]*\b|\b[A-Za-z_]\w*\b)/;
const WORDS = new Set(
  ('alignas auto bool break case char const constexpr continue do double else extern float for if inline int long return short '
    + 'signed sizeof static struct switch template typename unsigned void volatile while').split(' '),
);
const kindOf = (token) => {
  if (/^(\/\/|\/\*)/.test(token)) return 'comment';
  if (/^["#]/.test(token)) return 'string';
  if (/^\d/.test(token)) return 'number';
  if (WORDS.has(token) || /^__\w+__$/.test(token)) return 'word';
  return /^(wgmma|tma|mma|mbarrier|barrier|cp_async|ldmatrix|_mm)/.test(token) ? 'instruction' : null;
};
const Line = ({ text }) => text.split(TOKEN).map((token) => {
  const kind = token && kindOf(token);
  return kind ? html`<i class=${kind}>${token}</i>` : token;
});

// The listing of a kernel; the parts that were read stay.
const read = new Map();
function useListing(digest, kind) {
  const [answer, setAnswer] = useState(null), path = `/v1/kernels/${digest}/${kind}`;
  useEffect(() => {
    if (!digest) return;
    let isGone = false;
    if (!read.has(path)) read.set(path, getText(path));
    setAnswer(null);
    read.get(path).then((text) => isGone || setAnswer({ text }), (error) => {
      read.delete(path);
      if (!isGone) setAnswer({ error: error.message });
    });
    return () => (isGone = true);
  }, [path]);
  return answer;
}

function Listing({ digest, kind }) {
  const answer = useListing(digest, kind);
  if (!answer) return html`<p class="quiet" role="status">Reading ${kind}…</p>`;
  if (answer.error) return html`<p class="bad" role="status">${answer.error}</p>`;
  const lines = answer.text.split('\n');
  return html`<div class="listing" data-testid=${kind} tabindex="0" role="group" aria-label=${kind}><pre>${lines.map((line, i) => html`<span class="line"><i class="at">${i + 1}</i><${Line} text=${line} />${'\n'}</span>`)}</pre></div>`;
}

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

function Compiled({ kernel }) {
  const kinds = ['source', ...(kernel.language === 'cuda' ? ['ptx', 'sass'] : [])], kind = kinds.includes(state.listing.value) ? state.listing.value : 'source';
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
    <div class="choices">${kinds.map((each) => html`<button aria-pressed=${each === kind} onClick=${() => (state.listing.value = each)}>${each}</button>`)}</div>
    <${Listing} digest=${kernel.digest} kind=${kind} />
    <${Compare} kernel=${kernel} />`;
}

export function Text() {
  const kernel = state.kernel.value;
  return html`<section class="panel" aria-labelledby="text-title"><header><h2 id="text-title">Kernel</h2></header>
    ${kernel ? html`<${Compiled} kernel=${kernel} />` : html`<p class="quiet">Not compiled: all of the above is the model's word. Compile builds the first program.</p>`}
    ${state.text.value && html`<${Launch} />`}</section>`;
}
