// The answer first: how long, why, and what would help.
import { html } from 'htm/preact';
import { callsOf, onceOf, operationsOf } from './calls.js';
import { COMPUTE, colour, tone } from './colours.js';
import * as f from './format.js';
import { Levels, Roofline } from './roofline.js';
import { PLAIN } from './programs.js';
import { builtNumber, chosen as chosenNumber, kernel as compiled, mainKernel, program, story } from './state.js';
import { Legend, TermBar, adding, besides, secondsOf } from './termbar.js';

const WORTH_SAYING = 0.01; // of the time
const SHOWN_RESOURCES = 5;
const MEANINGS = { exposed: 'first loads, last results, and what overlaps imperfectly' };

const sum = (terms) => terms.reduce((total, term) => total + secondsOf(term), 0);
const Dot = ({ name }) => html`<i class="dot" style=${`--c:${colour(story.value.device, name)}`}></i>`;
function work({ amount, unit, rate, source }) {
  if (unit !== 'B' && unit !== 'operations') return '';
  return `${f.amount(amount, unit)} at ${f.rate(rate, unit)}${source === 'assumed' ? ' (assumed)' : ''}, `;
}

function bound(kernel) {
  const [first, second] = besides(kernel);
  if (first) {
    const [most, ...others] = first.terms, takes = others.length
      ? `${f.time(secondsOf(most))} of ${f.time(first.seconds)}, to which ${others.map((term) => term.name).join(', ')} add`
      : `${work(most)}${f.time(first.seconds)}`;
    return html`<li><${Dot} name=${most.name} /><b>${most.name} takes longest</b>: ${takes}.
      ${second && ` ${second.name} beside it would be done after ${f.time(second.seconds)}.`}</li>`;
  }
  const [most, next] = adding(kernel).sort((a, b) => secondsOf(b) - secondsOf(a));
  if (!most) return null;
  return html`<li><${Dot} name=${most.name} /><b>Mostly ${most.name}</b>: ${f.percent(secondsOf(most) / kernel.seconds)} of the time${next
    && `, then ${next.name} with ${f.percent(secondsOf(next) / kernel.seconds)}`}. These terms add up.</li>`;
}

function resourceOf({ name, unit }) {
  if (unit === 'B') return `${name} bandwidth`;
  return COMPUTE.includes(name) && unit === 'operations' ? 'arithmetic rate' : 'issue rate';
}

// The longest term is not always the resource that limits.
function limit({ limited_by: resources = [] }, kernel) {
  const [top] = resources, longest = besides(kernel)[0]?.terms[0];
  if (!longest || !top || top.saved < WORTH_SAYING) return null;
  const resource = resourceOf(longest), own = resources.find((each) => each.resource === resource) ?? { resource, saved: 0 };
  if (top === own || top.saved < 2 * own.saved) return null;
  return html`<li><${Dot} name=${top.resource.split(' ')[0]} /><b>But ${top.resource} limits</b>: 10 % more of it saves ${f.percent(top.saved)},
    10 % more ${own.resource} ${own.saved < 5e-4 ? 'nothing' : `only ${f.percent(own.saved)}`}.</li>`;
}

function hidden(chosen) {
  const calls = callsOf(chosen), lost = calls.flatMap(adding);
  if (!calls.some((kernel) => besides(kernel).length) || sum(lost) < WORTH_SAYING * chosen.seconds) return null;
  const named = new Map();
  for (const term of lost) named.set(term.name, (named.get(term.name) ?? 0) + secondsOf(term));
  const parts = [...named].map(([name, seconds]) => `${name} ${f.time(seconds)}${MEANINGS[name] ? ` (${MEANINGS[name]})` : ''}`).join(', ');
  return html`<li><${Dot} name="exposed" />Not hidden: ${parts}. That is ${f.percent(sum(lost) / chosen.seconds)} of the time.</li>`;
}

function executed({ operations, view }) {
  const factor = operations.executed / operations.definition;
  if (!(Math.abs(factor - 1) > 0.02)) return null;
  return html`<li><${Dot} name="compute" />${PLAIN.includes(view ?? '') ? 'It' : view} executes ${f.amount(operations.executed, 'operations')}, ${f.percent(factor)} of the${' '}
    ${f.amount(operations.definition, 'operations')} of the definition.</li>`;
}

function before(chosen) {
  const once = onceOf(chosen);
  if (!once.length) return null;
  return html`<li data-testid="once"><i class="dot" style="--c:var(--ink-3)"></i>Once, before all calls: ${f.time(once.reduce((total, kernel) => total + kernel.seconds, 0))}${' '}
    of ${once.map((kernel) => kernel.group).join(', ')}, of constants alone. No call has it.</li>`;
}

function aboveFloor(chosen, floor) {
  if (!floor) return null;
  return html`<li><i class="dot" style="--c:var(--ink-3)"></i>No tiles go below ${f.time(floor.seconds)}${' '}
    (${floor.arithmetic_seconds > floor.traffic_seconds ? `${f.amount(floor.operations, 'operations')} on ${floor.unit}` : `${f.bytes(floor.bytes)} once through ${floor.level}`}):${' '}
    this is ${f.times(chosen.seconds / floor.seconds)} that.</li>`;
}

function measured(chosen) {
  const median = compiled.value?.measurement?.median_s;
  if (!median) return null;
  const off = chosen.seconds / median - 1;
  return html`<li><i class="dot" style="--c:var(--good)"></i>Measured ${f.time(median)}: the estimate is ${f.percent(Math.abs(off))} ${off > 0 ? 'high' : 'low'}.</li>`;
}

function Sensitivity({ resources }) {
  if (!resources) return html`<p class="quiet" data-testid="sensitivity">What more of each resource saves is known of the first program.</p>`;
  const shown = resources.filter((each) => each.saved > 5e-4).slice(0, SHOWN_RESOURCES);
  return html`<div data-testid="sensitivity"><h3>10 % more of … saves</h3>
    ${shown.map(({ resource, saved }) => html`<div class="saves"><span>${resource}</span>
      <svg height="8" width="100%" aria-hidden="true"><rect width=${`${Math.min(100, 1000 * saved)}%`} height="8" style=${`fill:${colour(story.value.device, resource.split(' ')[0])}`} /></svg>
      <em>${(100 * saved).toFixed(1)} %</em></div>`)}
    ${!shown.length && html`<p class="quiet">Nothing above 0.05 %.</p>`}</div>`;
}

export function Verdict() {
  const { device, floor } = story.value, chosen = program.value, main = mainKernel.value;
  const calls = callsOf(chosen);
  const facts = [
    ['bound', html`<span style=${`color:${tone(device, chosen.bound)}`}>${chosen.bound}</span>`],
    floor && ['above the floor', f.times(chosen.seconds / floor.seconds)],
    ['rate', f.rate(operationsOf(chosen) / chosen.seconds, 'operations')],
    ['waves', main.waves],
    ['occupancy', f.percent(main.occupancy)],
    chosen.uncertainty && ['true within', f.times(chosen.uncertainty)],
  ].filter(Boolean);
  return html`<section class="panel verdict" aria-labelledby="verdict-title" data-testid="verdict">
    <h2 class="unseen" id="verdict-title">Verdict</h2>
    <div class="headline"><p class="big" data-testid="estimate">${f.time(chosen.seconds)}</p>
      <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></div>
    <${TermBar} kernels=${calls} device=${device} longest=${chosen.seconds} height=${26} />
    <${Legend} kernels=${calls} device=${device} />
    <div class="why"><div>
        <ul class="sentences">${bound(main)}${limit(chosen, main)}${hidden(chosen)}${executed(main)}${before(chosen)}${aboveFloor(chosen, floor)}${chosenNumber.value === builtNumber.value && measured(chosen)}</ul>
        <div class="facts"><${Sensitivity} resources=${chosen.limited_by} /><${Levels} /></div></div>
      <${Roofline} /></div>
  </section>`;
}
