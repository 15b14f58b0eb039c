// The roofline: each memory level of the chosen program's longest kernel under its own line.
import { html } from 'htm/preact';
import { colour } from './colours.js';
import * as f from './format.js';
import { mainKernel, story } from './state.js';

const WIDTH = 460, HEIGHT = 280, LEFT = 54, BOTTOM = 34, TOP = 14, RIGHT = 14;

// Operations per second of the compute term alone; its cycles may be those of other instructions too.
function computeRate({ terms, operations }) {
  const rates = terms.filter((term) => term.unit === 'operations').sort((a, b) => b.amount - a.amount);
  const compute = terms.find((term) => term.name === 'compute');
  return rates[0]?.rate ?? (compute && operations.executed / compute.seconds);
}

// A level's traffic and the operations per byte of it.
function read() {
  const { device } = story.value, kernel = mainKernel.value;
  const operations = kernel.operations.executed;
  const unit = { name: kernel.program.unit, rate: computeRate(kernel) };
  const levels = device.levels
    .filter((level) => level.name !== device.tile_levels[1])
    .map((level) => ({ level, term: kernel.terms.find((term) => term.name === level.name && term.unit === 'B' && term.amount > 0) }))
    .filter(({ term }) => term)
    .map(({ level, term }) => ({ name: level.name, rate: term.rate, moved: term.amount, intensity: operations / term.amount, assumed: term.source === 'assumed', fill: colour(device, level.name) }));
  return { kernel, operations, unit, levels, reached: operations / kernel.seconds };
}

export function Roofline() {
  const { unit, levels, reached } = read();
  if (!levels.length || !(unit.rate > 0) || !(reached > 0)) return null;
  const top = unit.rate;
  const xs = levels.flatMap((level) => [level.intensity, top / level.rate]);
  const x0 = Math.min(...xs) / 4, x1 = Math.max(...xs) * 4, y1 = Math.max(top, reached) * 2.5, y0 = Math.min(reached, top / 30) / 4;
  const x = (value) => LEFT + ((WIDTH - LEFT - RIGHT) * Math.log(value / x0)) / Math.log(x1 / x0);
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * Math.log(value / y0)) / Math.log(y1 / y0);
  const label = `${f.rate(reached, 'operations')} of ${f.rate(top, 'operations')}: ` + levels.map((level) => `${level.name} ${f.short(level.intensity)} op per byte`).join(', ');
  return html`<figure class="roofline"><svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} data-testid="roofline" role="img" aria-label=${label}>
    ${f.decades(x0, x1).map((value) => html`<line x1=${x(value)} x2=${x(value)} y1=${TOP} y2=${HEIGHT - BOTTOM} class="grid" />
      <text x=${x(value)} y=${HEIGHT - BOTTOM + 13} class="tick" text-anchor="middle">${value < 1 ? value.toPrecision(1) : f.count(value)}</text>`)}
    ${f.decades(y0, y1).map((value) => html`<line x1=${LEFT} x2=${WIDTH - RIGHT} y1=${y(value)} y2=${y(value)} class="grid" />
      <text x=${LEFT - 5} y=${y(value) + 3} class="tick" text-anchor="end">${f.amount(value, '').trim()}</text>`)}
    <text x=${(LEFT + WIDTH) / 2} y=${HEIGHT - 4} class="label" text-anchor="middle">operations per byte of a level</text>
    <text x=${-(HEIGHT - BOTTOM) / 2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">operations per second</text>
    <line x1=${x(Math.max(x0, top / Math.max(...levels.map((level) => level.rate))))} x2=${WIDTH - RIGHT} y1=${y(top)} y2=${y(top)} class="roof" />
    <text x=${WIDTH - RIGHT} y=${y(top) - 4} class="tick strong" text-anchor="end">${unit.name} ${f.rate(top, 'operations')}</text>
    ${levels.map((level) => {
      const from = Math.max(x0, y0 / level.rate), to = Math.min(x1, top / level.rate);
      return html`<line x1=${x(from)} y1=${y(from * level.rate)} x2=${x(to)} y2=${y(to * level.rate)} style=${`stroke:${level.fill};stroke-width:2`} />`;
    })}
    <line x1=${LEFT} x2=${WIDTH - RIGHT} y1=${y(reached)} y2=${y(reached)} class="reached" />
    ${levels.map((level) => html`<line x1=${x(level.intensity)} x2=${x(level.intensity)} y1=${y(reached)} y2=${y(Math.min(top, level.intensity * level.rate))} style=${`stroke:${level.fill}`} class="headroom" />
      <circle cx=${x(level.intensity)} cy=${y(reached)} r="5.5" style=${`fill:${level.fill}`}><title>${level.name}: ${f.bytes(level.moved)}, ${f.short(level.intensity)} op/B</title></circle>`)}
  </svg><figcaption>A dot is below its own line by the bandwidth that its level leaves unused.</figcaption></figure>`;
}

export function Levels() {
  const { kernel, operations, unit, levels } = read();
  const busy = (amount, rate) => f.percent(amount / rate / kernel.seconds);
  return html`<table class="levels"><thead><tr><th>level</th><th class="r">moves</th><th class="r">op/B</th><th class="r">busy</th></tr></thead><tbody>
    ${levels.map((level) => html`<tr><th scope="row"><i class="dot" style=${`--c:${level.fill}`}></i>${level.name}${level.assumed ? html`<small title="the rate is assumed, not measured"> ?</small>` : ''}</th>
      <td class="r">${f.bytes(level.moved)}</td><td class="r">${f.short(level.intensity)}</td><td class="r">${busy(level.moved, level.rate)}</td></tr>`)}
    ${unit.rate > 0 && html`<tr><th scope="row"><i class="dot" style="--c:var(--compute)"></i>${unit.name}</th><td class="r" colspan="2">${f.amount(operations, 'operations')}</td><td class="r">${busy(operations, unit.rate)}</td></tr>`}
  </tbody></table>`;
}
