// Two kernels side by side: what differs of their tiles and figures, and of their texts.
import { html } from 'htm/preact';
import { useEffect, useState } from 'preact/hooks';
import { getJson, getText } from './api.js';
import { storyOf } from './built.js';
import { launchFigures, longest } from './calls.js';
import { DigestForm } from './digestform.js';
import { diffLines } from './diff.js';
import * as f from './format.js';
import { compared, readReport } from './state.js';

const AROUND = 3; // equal lines that are shown around a difference
const SIGNS = { '-': 'this kernel alone', '+': 'the other alone' };

async function readKernel(digest) {
  const path = `/v1/kernels/${encodeURIComponent(digest)}`;
  const [facts, report, source] = await Promise.all([getJson(path), readReport(path), getText(`${path}/source`)]);
  const told = storyOf(report, facts);
  return { facts, source, program: told && longest(told.story.programs[told.number]).program };
}

// Name and value of what describes a kernel, in order.
function describe({ facts, program }) {
  const tiles = Object.entries(program?.tiles ?? {}).map(([level, tile]) => [`tile in ${level}`, Object.entries(tile).map((pair) => pair.join(' ')).join(' · ')]);
  const others = Object.entries(program ?? {}).filter(([, value]) => ['string', 'number', 'boolean'].includes(typeof value));
  return new Map([
    ['program', facts.expression],
    ['device', facts.target],
    ['estimate', f.time(facts.estimate?.seconds)],
    ['measured', f.time(facts.measurement?.median_s)],
    ...tiles,
    ...others.map(([name, value]) => [name.replaceAll('_', ' '), String(value)]),
    ...launchFigures(facts),
  ]);
}

function Figures({ pair }) {
  const [one, other] = pair.map(describe), names = [...new Set([...one.keys(), ...other.keys()])].filter((name) => one.get(name) !== other.get(name));
  if (!names.length) return html`<p class="quiet">Their tiles and figures are equal.</p>`;
  return html`<div class="scroll" tabindex="0" role="group" aria-label="table of differences"><table class="programs" data-testid="differences"><thead><tr><th>differs in</th><th>this kernel</th><th>the other</th></tr></thead>
    <tbody>${names.map((name) => html`<tr><th scope="row">${name}</th><td>${one.get(name) ?? '–'}</td><td>${other.get(name) ?? '–'}</td></tr>`)}</tbody></table></div>`;
}

// Which lines are near a difference; runs of others are left out.
function nearOf(lines) {
  const near = lines.map(() => false);
  lines.forEach(([sign], i) => {
    if (sign !== ' ') near.fill(true, Math.max(0, i - AROUND), i + AROUND + 1);
  });
  return near;
}

function Lines({ pair }) {
  const lines = diffLines(pair[0].source, pair[1].source), near = nearOf(lines), removed = lines.filter(([sign]) => sign === '-').length, added = lines.filter(([sign]) => sign === '+').length;
  if (!removed && !added) return html`<p class="quiet">Their texts are equal.</p>`;
  return html`<p class="quiet">${f.plural(removed, 'line')} of this kernel alone (−), ${f.count(added)} of the other (+)</p>
    <div class="listing" data-testid="difference" tabindex="0" role="group" aria-label="difference of the texts"><pre>${lines.map(([sign, line], i) => near[i]
      ? html`<span class=${`line ${{ '-': 'removed', '+': 'added' }[sign] ?? ''}`} title=${SIGNS[sign]}><i class="at">${sign}</i>${line}${'\n'}</span>`
      : near[i - 1] && html`<span class="line quiet"><i class="at">⋯</i>${'\n'}</span>`)}</pre></div>`;
}

export function Compare({ kernel }) {
  const [answer, setAnswer] = useState(null), other = compared.value;
  useEffect(() => {
    let isGone = false;
    setAnswer(null);
    if (other) Promise.all([kernel.digest, other].map(readKernel)).then((pair) => isGone || setAnswer({ pair }), (error) => isGone || setAnswer({ error: error.message }));
    return () => (isGone = true);
  }, [kernel.digest, other]);
  return html`<div class="compare"><h3>Compare</h3>
    <${DigestForm} chosen=${compared} noun="kernel" />
    ${answer?.error && html`<p class="bad" role="status">${answer.error}</p>`}
    ${answer?.pair && html`<${Figures} pair=${answer.pair} /><${Lines} pair=${answer.pair} />`}</div>`;
}
