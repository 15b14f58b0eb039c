// Every tile tried of one search: footprint against traffic. Growth goes right and down until the wall, the capacity.
import { html } from 'htm/preact';
import { colour, tone } from './colours.js';
import * as f from './format.js';
import { look, mainKernel, search, story } from './state.js';

const WIDTH = 560, HEIGHT = 300, LEFT = 70, RIGHT = 78, TOP = 12, BOTTOM = 36;
const GUTTER = { x: WIDTH - 42, columns: 2, rows: 15 }; // of tiles whose footprint or traffic is not known: they were refused before
const MARK = 4;

export const isAccepted = (tile) => tile.outcome === 'accepted';
const isRefused = (tile) => tile.outcome === 'rejected';

// Whether ROLLER's test asks for a larger tile: memory is still slower than compute.
export const isGrowing = (tried, tile) => tried.kind === 'scale-up' && !tile.saturated;

export function pathTo(steps, number) {
  const path = [];
  for (let i = number; i != null; i = steps[i].parent) path.push(i);
  return path;
}

// The vertical axis: traffic where it is known, else the estimate of the best program with the tile.
function vertical(steps) {
  const known = steps.filter((tile) => tile.traffic_bytes > 0);
  if (known.length) return { read: (tile) => tile.traffic_bytes, show: f.bytes, title: 'traffic from the level outside' };
  return { read: (tile) => tile.seconds, show: f.time, title: 'estimate of the best program with it' };
}

const scale = (low, high, from, to) => (value) => from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
function range(values, factor) {
  const positive = values.filter((value) => value > 0);
  return positive.length ? [Math.min(...positive) / factor, Math.max(...positive) * factor] : [1, 2];
}
function powersOfTwo([low, high]) {
  const first = Math.ceil(Math.log2(low)), last = Math.floor(Math.log2(high)), every = Math.ceil((last - first + 1) / 8) || 1;
  return Array.from({ length: Math.max(0, Math.floor((last - first) / every) + 1) }, (_, i) => 2 ** (first + i * every));
}

function place(tiles, capacity) {
  const upright = vertical(tiles);
  const shown = tiles.filter((tile) => upright.read(tile) > 0);
  const xs = range([...shown.map((tile) => tile.footprint_bytes), capacity], 1.5), ys = range(shown.map(upright.read), 1.2);
  const x = scale(...xs, LEFT, WIDTH - RIGHT), y = scale(...ys, HEIGHT - BOTTOM, TOP);
  let refused = 0;
  const points = tiles.map((tile) => {
    if (tile.footprint_bytes > 0 && upright.read(tile) > 0) return [x(tile.footprint_bytes), y(upright.read(tile))];
    const number = refused++ % (GUTTER.columns * GUTTER.rows);
    return [GUTTER.x + 16 * (number % GUTTER.columns), TOP + 24 + 15 * Math.floor(number / GUTTER.columns)];
  });
  return { points, x, y, xs, ys, upright, refused };
}

export function Landscape({ tried, now }) {
  const { device } = story.value, tiles = tried.steps, fill = colour(device, tried.level), capacity = tried.capacity_bytes;
  const { points, x, y, xs, ys, upright, refused } = place(tiles, capacity);
  const path = new Set(pathTo(tiles, now));
  const won = new Set((mainKernel.value?.found ?? []).filter((each) => each.search === search.value).map((each) => each.step));
  const label = `${f.plural(tiles.length, 'tile')} tried for ${tried.level}: footprint against ${upright.title}`;
  return html`<svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} class="landscape" role="img" aria-label=${label} data-testid="tiles">
    ${powersOfTwo(xs).map((value) => html`<line x1=${x(value)} x2=${x(value)} y1=${TOP} y2=${HEIGHT - BOTTOM} class="grid" />
      <text x=${x(value)} y=${HEIGHT - BOTTOM + 13} class="tick" text-anchor="middle">${f.bytes(value)}</text>`)}
    <line x1=${LEFT} x2=${WIDTH - RIGHT} y1=${HEIGHT - BOTTOM} y2=${HEIGHT - BOTTOM} class="axis-line" />
    <text x=${(LEFT + WIDTH - RIGHT) / 2} y=${HEIGHT - 4} class="label" text-anchor="middle">footprint in ${tried.level}</text>
    <text x=${-(HEIGHT - BOTTOM) / 2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">${upright.title}</text>
    ${[ys[0] * 1.2, Math.sqrt(ys[0] * ys[1]), ys[1] / 1.2].map((value) => html`<text x=${LEFT - 5} y=${y(value) + 3} class="tick" text-anchor="end">${upright.show(value)}</text>`)}
    ${capacity > 0 && html`<rect x=${x(capacity)} y=${TOP} width=${WIDTH - RIGHT - x(capacity) + 14} height=${HEIGHT - BOTTOM - TOP} class="wall" />
      <line x1=${x(capacity)} x2=${x(capacity)} y1=${TOP} y2=${HEIGHT - BOTTOM} style=${`stroke:${fill};stroke-width:1.5`} />
      <text x=${x(capacity) - 4} y=${TOP + 8} class="tick" text-anchor="end" style=${`fill:${tone(device, tried.level)}`}>capacity ${f.bytes(capacity)}</text>`}
    ${refused > 0 && html`<text x=${GUTTER.x + 8} y=${TOP + 8} class="tick" text-anchor="middle">refused early</text>`}
    ${tiles.map((tile, i) => tile.parent != null && html`<line x1=${points[tile.parent][0]} y1=${points[tile.parent][1]} x2=${points[i][0]} y2=${points[i][1]}
      class=${path.has(i) ? 'edge on' : i <= now ? 'edge' : 'edge later'} style=${path.has(i) ? `stroke:${fill}` : ''} />`)}
    ${tiles.map((tile, i) => {
      const [cx, cy] = points[i];
      return html`<g class=${i > now ? 'spot later' : 'spot'} onClick=${() => look(search.value, i)}>
        <circle cx=${cx} cy=${cy} r="9" fill="transparent" />
        ${!isRefused(tile)
          ? html`<circle cx=${cx} cy=${cy} r=${MARK} style=${isGrowing(tried, tile) ? `fill:var(--paper);stroke:${fill};stroke-width:1.5` : `fill:${fill}`} />`
          : html`<path d=${`M${cx - MARK} ${cy - MARK}l${2 * MARK} ${2 * MARK}m0-${2 * MARK}l-${2 * MARK} ${2 * MARK}`} class="cross" />`}
        ${won.has(i) && html`<circle cx=${cx} cy=${cy} r="8" class="won" />`}${i === now && html`<circle cx=${cx} cy=${cy} r="11" class="now" />`}
        <title>${f.tile(tried.axes, tile.tile)}: ${tile.footprint_bytes > 0 ? f.bytes(tile.footprint_bytes) : 'no footprint'}, ${tile.limit?.rule ?? tile.outcome}${tile.seconds ? `, ${f.time(tile.seconds)}` : ''}</title>
      </g>`;
    })}
  </svg>`;
}

export const Marks = ({ tried }) => html`<ul class="legend">
  ${tried.kind === 'scale-up' && html`<li><i class="ring" style=${`--c:${colour(story.value.device, tried.level)}`}></i>fits</li>
    <li><i class="disc" style=${`--c:${colour(story.value.device, tried.level)}`}></i>fits and is large enough</li>`}
  <li><i class="bad">✕</i>refused</li><li><i class="ring" style="--c:var(--ink)"></i>of the chosen program</li></ul>`;
