// The operators: the whole model as a strip, and a part of it to read.
import { html } from 'htm/preact';
import { useEffect } from 'preact/hooks';
import { signal } from '@preact/signals';
import { Canvas, fit, palette } from './canvas.js';
import * as f from './format.js';
import { model, picked } from './modelstate.js';

const COLUMN = 138, BOX = 116, ROW = 42, TALL = 30, PAD = 12, MOST = 230, STRIP = 54;
const offset = signal([0, 0]); // pixels of the graph that are left of, and above, what is shown
let shown = 0; // width
const shade = (heat) => `color-mix(in oklab, ${palette().thread} ${Math.round(10 + 62 * heat)}%, ${palette().paper})`;
const heightOf = ({ rows }) => Math.min(MOST, rows * ROW + PAD);
const sizeOf = ({ columns, rows }) => [columns.length * COLUMN + PAD, rows * ROW + PAD];

function moveTo(x, y) {
  const [width, height] = sizeOf(model.value.graph);
  offset.value = [Math.max(0, Math.min(width - shown, x)), Math.max(0, Math.min(height - heightOf(model.value.graph), y))];
}

function drawWires(context, graph, x, y, width) {
  const colours = palette(), pick = picked.value;
  for (const [from, to] of graph.wires) {
    const [left, top] = graph.at[from], [right, bottom] = graph.at[to], x0 = x(left) + BOX, x1 = x(right);
    if (x1 < 0 || x0 > width) continue;
    const isNear = from === pick || to === pick, y0 = y(top) + TALL / 2, y1 = y(bottom) + TALL / 2, bend = Math.min(40, (x1 - x0) / 2);
    context.strokeStyle = isNear ? colours.accent : colours['ink-3'];
    context.globalAlpha = isNear ? 1 : 0.35;
    context.lineWidth = isNear ? 1.6 : 1;
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    context.stroke();
  }
  context.globalAlpha = 1;
}

function draw(context, width, height) {
  const { graph, story, heat, labels } = model.value, [left, top] = offset.value, colours = palette(), pick = picked.value;
  shown = width;
  const x = (rank) => PAD + rank * COLUMN - left, y = (row) => PAD + row * ROW - top;
  drawWires(context, graph, x, y, width);
  context.textAlign = 'center';
  const first = Math.max(0, Math.floor((left - BOX - PAD) / COLUMN)), last = Math.min(graph.columns.length, Math.ceil((left + width) / COLUMN) + 1);
  for (const number of graph.columns.slice(first, last).flat()) {
    const [rank, row] = graph.at[number], at = [x(rank), y(row), BOX, TALL];
    if (at[1] > height || at[1] + TALL < 0) continue;
    context.fillStyle = shade(heat[number]);
    context.fillRect(...at);
    context.strokeStyle = number === pick ? colours.accent : colours.line;
    context.lineWidth = number === pick ? 2.5 : 1;
    context.strokeRect(...at);
    context.fillStyle = colours.ink;
    context.fillText(fit(labels[number], BOX - 6), at[0] + BOX / 2, at[1] + 13);
    context.fillStyle = colours['ink-2'];
    context.fillText(f.time(story.nodes[number].seconds), at[0] + BOX / 2, at[1] + 25);
  }
  context.textAlign = 'left';
}

function drawStrip(context, width) {
  const { graph, heat } = model.value, [whole, tall] = sizeOf(graph), colours = palette(), [left, top] = offset.value;
  const x = (pixels) => (pixels / whole) * width, y = (pixels) => (pixels / tall) * STRIP;
  graph.at.forEach((at, number) => {
    if (!at) return;
    context.fillStyle = number === picked.value ? colours.accent : shade(heat[number]);
    context.fillRect(x(at[0] * COLUMN), y(at[1] * ROW), Math.max(1.2, x(BOX)), Math.max(1.5, y(TALL)));
  });
  context.strokeStyle = colours.accent;
  context.strokeRect(x(left) + 0.5, y(top) + 0.5, Math.min(width, x(shown || width)) - 1, Math.min(STRIP, y(heightOf(graph))) - 1);
}

const numberAt = (event) => {
  const { graph } = model.value, box = event.currentTarget.getBoundingClientRect(), [left, top] = offset.value;
  const x = event.clientX - box.left + left - PAD, y = event.clientY - box.top + top - PAD, rank = Math.floor(x / COLUMN);
  if (x - rank * COLUMN > BOX) return null;
  return graph.columns[rank]?.find((each) => Math.abs(graph.at[each][1] * ROW + TALL / 2 - y) <= TALL / 2) ?? null;
};

let from = null, moved = 0;
const EVENTS = {
  pointerdown: (event) => {
    from = [event.clientX, event.clientY];
    moved = 0;
  },
  pointermove: (event) => {
    if (!from || !event.buttons) return;
    const [x, y] = offset.value, by = [from[0] - event.clientX, from[1] - event.clientY];
    moveTo(x + by[0], y + by[1]);
    moved += Math.abs(by[0]) + Math.abs(by[1]);
    from = [event.clientX, event.clientY];
  },
  pointerup: (event) => {
    if (from && moved < 4) picked.value = numberAt(event);
    from = null;
  },
  wheel: (event) => {
    const [x, y] = offset.value;
    if (!event.deltaX && !event.shiftKey) return;
    event.preventDefault();
    moveTo(x + (event.deltaX || event.deltaY), y);
  },
  keydown: (event) => {
    const { columns } = model.value.graph, listed = columns.flat(), at = listed.indexOf(picked.value);
    const next = { ArrowRight: at + 1, ArrowLeft: Math.max(0, at - 1), Home: 0, End: listed.length - 1 }[event.key];
    if (event.key === 'Escape') picked.value = null;
    if (next === undefined || next >= listed.length) return;
    event.preventDefault();
    picked.value = listed[next];
  },
};
const STRIP_EVENTS = {
  pointerdown: (event) => seek(event),
  pointermove: (event) => event.buttons && seek(event),
  keydown: (event) => EVENTS.keydown(event),
};
function seek(event) {
  const [whole] = sizeOf(model.value.graph), box = event.currentTarget.getBoundingClientRect();
  moveTo(((event.clientX - box.left) / box.width) * whole - shown / 2, offset.value[1]);
}

export function Graph() {
  const { graph, story } = model.value, pick = picked.value;
  useEffect(() => {
    const at = pick !== null && graph.at[pick];
    if (!at) return;
    const x = at[0] * COLUMN, y = at[1] * ROW, [left, top] = offset.value;
    if (x < left || x + BOX > left + shown || y < top || y + TALL > top + heightOf(graph)) moveTo(x - shown / 2, y - heightOf(graph) / 2);
  }, [pick, graph]);
  const views = story.nodes.filter((node) => node.view).length;
  return html`<section class="panel graph" aria-labelledby="graph-title">
    <header><h2 id="graph-title">Operators</h2><span class="quiet">${f.plural(story.nodes.length - views, 'node')}${views ? `, ${f.plural(views, 'view')} drawn as edges` : ''} · darker is longer · ← → choose, drag</span></header>
    <${Canvas} draw=${drawStrip} height=${STRIP} testid="strip" events=${STRIP_EVENTS} label="the whole model, from its inputs to its outputs" />
    <${Canvas} draw=${draw} height=${heightOf(graph)} testid="graph" events=${EVENTS} label=${`${f.plural(story.nodes.length - views, 'operator')} in ${f.plural(graph.columns.length, 'rank')}`} />
  </section>`;
}
