// Whole result, task and thread tile, each to its own scale: the small rectangle of one is the whole of the next.
import { html } from 'htm/preact';
import * as f from './format.js';
import { mainKernel, story } from './state.js';

const SIDE = 168;
const MAX_LINES = 64; // of a grid
const REDUCED = ['k', 'inner', 'reduce', 'tap'];

// The two axes that are drawn, and the reduced one.
function drawnAxes({ roles, extents }) {
  const at = (role) => roles.indexOf(role);
  if (at('m') >= 0 && at('n') >= 0) return [at('m'), at('n'), at('k')];
  const spatial = roles.map((_, i) => i).filter((i) => !REDUCED.includes(roles[i]));
  const [first = 0, second = first] = spatial.sort((a, b) => extents[b] - extents[a]).slice(0, 2).sort((a, b) => a - b);
  return [first, second, at('k')];
}

// The tiles of the step and of the chosen program's other level.
function nested(tried, tile) {
  const [block, thread] = story.value.device.tile_levels, own = mainKernel.value?.program.tiles;
  const isSame = own && Object.keys(own[block] ?? {}).join() === tried.axes.join();
  const of = (level) => tried.axes.map((axis) => own[level]?.[axis] ?? 1);
  if (tried.level === block) return { block: tile.tile, thread: tile.base ?? tried.base ?? (isSame ? of(thread) : tile.tile) };
  return { block: isSame ? of(block) : tile.tile, thread: tile.tile };
}

function Frame({ name, size, inner, colour, innerColour, axes: [y, x, z], names, depth, note }) {
  const longest = Math.max(size[y], size[x]), strip = depth ? Math.min(depth, longest) : 0;
  const scale = SIDE / (longest + strip);
  const w = Math.max(3, size[x] * scale), h = Math.max(3, size[y] * scale), d = strip && Math.max(4, strip * scale);
  const iw = inner ? Math.max(2, Math.min(w, inner[x] * scale)) : 0, ih = inner ? Math.max(2, Math.min(h, inner[y] * scale)) : 0;
  const lines = (length, part) => (part > 3 && length / part > 1.5 ? Array.from({ length: Math.min(Math.round(length / part), MAX_LINES) - 1 }, (_, i) => part * (i + 1)) : []);
  const label = `${name}: ${names[y]} ${size[y]} by ${names[x]} ${size[x]}${depth ? `, ${names[z]} ${depth}` : ''}`;
  return html`<figure><svg viewBox=${`-20 -16 ${SIDE + 24} ${SIDE + 26}`} role="img" aria-label=${label}>
    ${d > 0 && html`<rect y=${d} width=${d} height=${h} class="strip" /><rect x=${d} width=${w} height=${d} class="strip" />
      <text x=${d / 2} y=${d - 3} class="tick" text-anchor="middle">${d > 14 ? `${names[z]} ${depth}` : ''}</text>`}
    <g transform=${`translate(${d} ${d})`}>
      <rect width=${w} height=${h} style=${`fill:color-mix(in oklab, ${colour} 13%, transparent);stroke:${colour};stroke-width:1.5`} />
      ${lines(w, iw).map((at) => html`<line x1=${at} x2=${at} y2=${h} class="hair" style=${`stroke:${colour}`} />`)}
      ${lines(h, ih).map((at) => html`<line y1=${at} y2=${at} x2=${w} class="hair" style=${`stroke:${colour}`} />`)}
      ${inner && html`<rect width=${iw} height=${ih} style=${`fill:${innerColour}`} opacity="0.85" />`}</g>
    <text x=${d + w / 2} y="-5" class="tick" text-anchor="middle">${names[x]} ${size[x]}</text>
    <text transform=${`translate(-7 ${d + h / 2}) rotate(-90)`} class="tick" text-anchor="middle">${names[y]} ${size[y]}</text>
  </svg><figcaption><b style=${`color:color-mix(in oklab, ${colour} 70%, var(--ink))`}>${name}</b><span>${note}</span></figcaption></figure>`;
}

function Ruler({ axis, role, thread, block, whole }) {
  const share = (extent) => (whole > 1 ? Math.min(1, Math.log2(Math.max(1, extent)) / Math.log2(whole)) : 1);
  return html`<div class="ruler"><span>${axis}${role !== axis && html`<small>${role}</small>`}</span>
    <svg width="100%" height="12" role="img" aria-label=${`${axis}: ${thread} of ${block} of ${whole}`}>
      <rect y="4" height="4" width="100%" class="track" /><rect y="2" height="8" width=${`${100 * share(block)}%`} style="fill:var(--block)" opacity=".75" />
      <rect height="12" width=${`${Math.max(1, 100 * share(thread))}%`} style="fill:var(--thread)" /></svg>
    <em>${thread} <i>▸</i> ${block} <i>▸</i> ${whole}</em></div>`;
}

export function Tiles({ tried, tile }) {
  const { device } = story.value, [blockLevel, threadLevel] = device.tile_levels;
  const axes = drawnAxes(tried), [y, x, z] = axes, { block, thread } = nested(tried, tile), whole = tried.extents;
  const ratio = (outer, inner) => Math.ceil(outer[y] / inner[y]) * (x === y ? 1 : Math.ceil(outer[x] / inner[x]));
  const frames = [
    { name: 'whole result', size: whole, inner: block, colour: 'var(--outer)', innerColour: 'var(--block)', note: f.plural(ratio(whole, block), 'tile') },
    { name: `task in ${blockLevel}`, size: block, inner: thread, colour: 'var(--block)', innerColour: 'var(--thread)', depth: z >= 0 ? block[z] : 0, note: f.plural(ratio(block, thread), 'tile') },
    { name: `tile in ${threadLevel}`, size: thread, colour: 'var(--thread)', note: tried.unit },
  ];
  return html`<div class="nested" data-testid="tile"><div class="frames">${frames.map((frame) => html`<${Frame} ...${frame} axes=${axes} names=${tried.axes} />`)}</div>
    <div class="rulers">${tried.axes.map((axis, i) => html`<${Ruler} axis=${axis} role=${tried.roles[i]} thread=${thread[i]} block=${block[i]} whole=${whole[i]} />`)}</div></div>`;
}
