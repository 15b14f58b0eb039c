// The ranked programs. The arrow keys and a click choose one; everything else follows.
import { html } from 'htm/preact';
import { useState } from 'preact/hooks';
import { callsOf, longest, onceOf } from './calls.js';
import * as f from './format.js';
import { programText } from './built.js';
import { choose, chosen, measured, story } from './state.js';
import { TermBar } from './termbar.js';

const FIRST = 6;
const CUT = 2.5; // times the first: longer bars are cut
export const PLAIN = ['contraction', 'attention', ''];

const OPTIONS = [
  ['split_k', 1, (n) => `split-k ${n}`],
  ['stages', 1, (n) => `${n} stages`],
  ['stream_k', 0, (n) => `stream-k ${n}`],
  ['pingpong', 0, () => 'ping-pong'],
  ['blocks', 0, (n) => `${n} persistent`],
  ['raster', 1, (n) => `raster ${n}`],
];
function options(kernel) {
  const named = OPTIONS.filter(([name, usual]) => kernel[name] > usual).map(([name, , say]) => say(kernel[name]));
  const { cluster_m: m = 1, cluster_n: n = 1, cluster_k: k = 1 } = kernel;
  return [...named, m * n * k > 1 && `cluster ${m}×${n}${k > 1 ? `×${k}` : ''}`].filter(Boolean).join(', ');
}
const kernels = (program) => f.plural(callsOf(program).length, 'kernel') + (onceOf(program).length ? `, ${onceOf(program).length} once` : '');
const tile = (kernel, level) =>
  Object.entries(kernel.tiles[level] ?? {}).filter(([, n]) => n > 1).map(([axis, n]) => html`<span class="axis">${axis}<b>${n}</b></span>`);

function Measured({ program }) {
  const seconds = measured.value[programText(program)], off = program.seconds / seconds - 1;
  if (!seconds) return html`<td class="r">–</td><td class="r"></td>`;
  return html`<td class="r">${f.time(seconds)}</td><td class="r">${f.percent(Math.abs(off))} ${off > 0 ? 'high' : 'low'}</td>`;
}

export function Programs() {
  const [all, setAll] = useState(false);
  const { device, programs, constructions } = story.value, [block, thread] = device.tile_levels;
  const visited = constructions.reduce((tiles, each) => tiles + each.tiles_visited, 0);
  const refusals = constructions.flatMap((each) => each.refusals);
  const shown = all || chosen.value >= FIRST ? programs : programs.slice(0, FIRST);
  const most = Math.min(Math.max(...shown.map((each) => each.seconds)), CUT * programs[0].seconds);
  const isTimed = Object.keys(measured.value).length > 0;
  const onKey = (event, i) => {
    const next = { ArrowDown: i + 1, ArrowUp: i - 1, Enter: i, ' ': i }[event.key];
    if (next === undefined || !shown[next]) return;
    event.preventDefault();
    choose(next);
    event.currentTarget.parentNode.children[next].focus();
  };
  return html`<section class="panel" aria-labelledby="programs-title">
    <header><h2 id="programs-title">Ranked programs</h2><span class="quiet">the best of ${f.plural(visited, 'tile')} · ↑ ↓ choose</span></header>
    <div class="scroll" tabindex="0" role="group" aria-label="table of programs"><table class="programs" data-testid="programs">
      <thead><tr><th class="r">#</th><th>unit</th><th>${block} tile</th><th>${thread} tile</th><th>options</th><th class="wide">terms</th><th class="r">estimate</th>${isTimed && html`<th class="r">measured</th><th class="r">estimate is</th>`}<th class="r">waves</th><th class="r">occ.</th></tr></thead>
      <tbody>${shown.map((each, i) => {
        const kernel = longest(each), own = kernel.program;
        return html`<tr key=${i} tabindex=${i === chosen.value ? 0 : -1} aria-current=${i === chosen.value} data-testid=${`program-${i}`} class=${i === chosen.value ? 'on' : ''}
          onClick=${() => choose(i)} onKeyDown=${(event) => onKey(event, i)}>
          <td class="r">${i + 1}</td>
          <td>${own.unit}${!PLAIN.includes(kernel.view ?? '') && html`<small>${kernel.view}</small>`}${each.kernels.length > 1 && html`<small>${kernels(each)}</small>`}</td>
          <td>${tile(own, block)}</td><td>${tile(own, thread)}</td><td class="options">${options(own)}</td>
          <td class="wide"><${TermBar} kernels=${callsOf(each)} device=${device} longest=${most} /></td>
          <td class="r strong">${f.time(each.seconds)}</td>${isTimed && html`<${Measured} program=${each} />`}<td class="r">${kernel.waves}</td><td class="r">${f.percent(kernel.occupancy)}</td></tr>`;
      })}</tbody></table></div>
    ${programs.length > FIRST && html`<button class="more" onClick=${() => setAll(!all)}>${all ? 'fewer' : `all ${programs.length}`}</button>`}
    ${refusals.length > 0 && html`<details class="quiet"><summary>${f.plural(refusals.length, 'unit')} refused</summary><ul>${refusals.map((each) => html`<li>${each}</li>`)}</ul></details>`}
  </section>`;
}
