// When each core does what, and below it, on the same axis, the memory that tensors have.
import { html } from 'htm/preact';
import { Canvas, fit, hatch, palette } from './canvas.js';
import * as f from './format.js';
import { edited, firstAfter, measured, model, move, picked, range, wholeSeconds, zoom } from './modelstate.js';

const LEFT = 58, TOP = 18, ROW = 28, ARENA = 170;
const shade = (heat) => `color-mix(in oklab, ${palette().thread} ${Math.round(12 + 62 * heat)}%, ${palette().paper})`;
const scaleOf = (width) => {
  const [a, b] = range.value;
  return (time) => LEFT + ((time - a) / (b - a)) * (width - LEFT);
};
const timeAt = (event) => {
  const [a, b] = range.value, box = event.currentTarget.getBoundingClientRect();
  return a + ((event.clientX - box.left - LEFT) / (box.width - LEFT)) * (b - a);
};

function drawTicks(context, width, height) {
  const [a, b] = range.value, x = scaleOf(width), colours = palette();
  const unit = 10 ** Math.floor(Math.log10((b - a) / 4)), every = unit * ([1, 2, 5].find((each) => (b - a) / (unit * each) <= Math.max(2, width / 90)) ?? 10);
  context.fillStyle = colours['ink-3'];
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  let last = '';
  for (let tick = Math.ceil(a / every) * every; tick <= b; tick += every) {
    context.beginPath();
    context.moveTo(x(tick), TOP - 4);
    context.lineTo(x(tick), height);
    context.stroke();
    const label = f.time(tick);
    context.fillText(label === last ? `+${f.time(tick - a)}` : label, x(tick) + 3, 10);
    last = label;
  }
}

function drawLane(context, width, lane, y, height) {
  const [a, b] = range.value, x = scaleOf(width), colours = palette(), { nodeOf, heat, labels } = model.value, pick = picked.value;
  let last = -1;
  for (let i = firstAfter(lane, a); i < lane.length && lane[i].start_s < b; i++) {
    const each = lane[i], node = nodeOf(each), left = Math.max(LEFT, x(each.start_s)), right = Math.min(width, x(each.end_s)), isPicked = pick !== null && node === pick;
    if (right < last + 0.6 && !isPicked) continue; // within a pixel that is drawn
    last = right;
    const size = Math.max(0.8, right - left);
    if (each.kind === 'wait') {
      if (size > 1.5) hatch(context, left, y + height / 2 - 4, size, 8, colours['ink-3']);
      continue;
    }
    context.globalAlpha = pick === null || isPicked ? 1 : 0.35;
    context.fillStyle = node === null ? colours.launch : shade(heat[node]);
    context.fillRect(left, y + 2, Math.max(0.8, size - (size > 3 ? 1 : 0)), height - 4);
    if (isPicked) {
      context.strokeStyle = colours.accent;
      context.lineWidth = 2;
      context.strokeRect(left, y + 2, size, height - 4);
    }
    if (size > 34) {
      context.fillStyle = colours.ink;
      context.fillText(fit(node === null ? each.kind : labels[node], size - 6), left + 4, y + height / 2 + 3);
    }
    context.globalAlpha = 1;
  }
}

// What the picked node's waits are for: arrows of all waits would hide the rest.
function drawWaits(context, width) {
  const { lanes, found, nodeOf } = model.value, x = scaleOf(width), [a, b] = range.value, pick = picked.value;
  if (pick === null) return;
  context.strokeStyle = palette().accent;
  context.lineWidth = 1;
  lanes.forEach((lane, veu) => {
    for (let i = firstAfter(lane, a); i < lane.length && lane[i].start_s < b; i++) {
      if (lane[i].kind !== 'wait' || i + 1 >= lane.length || nodeOf(lane[i + 1]) !== pick) continue;
      for (const [other, order] of lane[i].for) {
        const source = found.get(`${other}/${order}`), from = x(source.end_s), to = x(lane[i].end_s);
        const y = (row) => TOP + row * ROW + ROW / 2;
        context.beginPath();
        context.moveTo(from, y(other));
        context.bezierCurveTo(from + 10, y(other), to - 10, y(veu), to, y(veu));
        context.stroke();
      }
    }
  });
}

function draw(context, width, height) {
  const { lanes, whole, busy } = model.value, colours = palette();
  drawTicks(context, width, height);
  lanes.forEach((lane, veu) => {
    context.fillStyle = colours.ink;
    context.fillText(lanes.length > 1 ? `core ${veu}` : 'all cores', 0, TOP + veu * ROW + 12);
    context.fillStyle = colours['ink-3'];
    context.fillText(f.percent(busy[veu]), 0, TOP + veu * ROW + 23);
    drawLane(context, width, lane, TOP + veu * ROW, ROW);
  });
  drawLane(context, width, whole, TOP, lanes.length * ROW);
  measured.value?.lanes.forEach((lane, veu) => {
    const y = TOP + (lanes.length + veu) * ROW;
    context.fillStyle = colours.ink;
    context.fillText('measured', 0, y + 12);
    context.fillStyle = colours['ink-3'];
    context.fillText(lanes.length > 1 ? `core ${veu}` : 'all cores', 0, y + 23);
    drawLane(context, width, lane, y, ROW);
  });
  drawWaits(context, width);
}

function drawArena(context, width, height) {
  const { buffers, story, used } = model.value, x = scaleOf(width), [a, b] = range.value, colours = palette(), pick = picked.value;
  const y = (offset) => 6 + (offset / Math.max(1, story.arena_bytes)) * (height - 12);
  context.fillStyle = colours['ink-3'];
  for (const share of [0, 0.5, 1]) context.fillText(f.bytes(Math.round(share * story.arena_bytes)), 0, Math.min(height - 2, y(share * story.arena_bytes) + 8));
  for (const each of buffers) {
    if (each.start_s > b) break;
    if (each.end_s < a) continue;
    const left = Math.max(LEFT, x(each.start_s)), size = Math.max(1, Math.min(width, x(each.end_s)) - left), top = y(each.offset_bytes), tall = Math.max(1.5, y(each.offset_bytes + each.bytes) - top - 0.5);
    const writes = pick !== null && each.written_by.some((step) => used[pick].has(step)), reads = pick !== null && each.read_by.some((step) => used[pick].has(step));
    context.globalAlpha = pick === null || writes || reads ? 0.85 : 0.25;
    context.fillStyle = writes ? colours.block : reads ? colours.outer : `color-mix(in oklab, ${colours.between} 45%, ${colours.paper})`;
    context.fillRect(left, top, size, tall);
    context.globalAlpha = 1;
    if (size > 60 && tall > 12) {
      context.fillStyle = writes || reads ? colours.paper : colours.ink;
      context.fillText(fit(`${each.name} ${f.bytes(each.bytes)}`, size - 6), left + 3, top + 10);
    }
  }
}

// A drag moves, the wheel with Ctrl zooms, w a s d do both by keyboard, a click picks.
function gestures(pickAt) {
  let from = null, moved = 0;
  return {
    pointerdown: (event) => {
      from = event.clientX;
      moved = 0;
    },
    pointermove: (event) => {
      if (from === null || !event.buttons) return;
      const box = event.currentTarget.getBoundingClientRect();
      move((from - event.clientX) / (box.width - LEFT));
      moved += Math.abs(event.clientX - from);
      from = event.clientX;
    },
    pointerup: (event) => {
      if (from !== null && moved < 4) pickAt(event);
      from = null;
    },
    wheel: (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = event.currentTarget.getBoundingClientRect();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.max(0, (event.clientX - box.left - LEFT) / (box.width - LEFT)));
    },
    keydown: (event) => {
      const action = { w: () => zoom(0.6), s: () => zoom(1.6), a: () => move(-0.2), d: () => move(0.2), Escape: () => (picked.value = null) }[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      action();
    },
  };
}

const TIMELINE = gestures((event) => {
  const { lanes, whole, nodeOf } = model.value, time = timeAt(event), box = event.currentTarget.getBoundingClientRect();
  const at = (lane) => lane?.[firstAfter(lane, time)], veu = Math.floor((event.clientY - box.top - TOP) / ROW);
  const hit = [at([...lanes, ...(measured.value?.lanes ?? [])][veu]), veu < lanes.length && at(whole)].find((each) => each && each.start_s <= time && each.kind !== 'wait');
  picked.value = hit ? nodeOf(hit) : null;
});
const MEMORY = gestures((event) => {
  const { buffers, story } = model.value, time = timeAt(event), box = event.currentTarget.getBoundingClientRect();
  const offset = ((event.clientY - box.top - 6) / (ARENA - 12)) * story.arena_bytes;
  const hit = buffers.find((each) => each.start_s <= time && time <= each.end_s && each.offset_bytes <= offset && offset < each.offset_bytes + each.bytes);
  picked.value = hit ? (story.steps[hit.written_by[0]]?.node ?? null) : null;
});

export function Timeline() {
  const { story, numWaits, lanes, labels } = model.value, [a, b] = range.value, end = wholeSeconds(), pick = picked.value;
  const whole = a === 0 && b >= end;
  return html`<section class="panel" aria-labelledby="timeline-title">
    <header><h2 id="timeline-title">Who does what when</h2>
      <span class="quiet">${f.plural(story.instructions.length, 'instruction')}${numWaits ? `, hatched: ${f.plural(numWaits, 'wait')}` : ''} · w s zoom, a d move, drag, Ctrl and wheel</span>
      <span class="choices"><button aria-label="earlier" onClick=${() => move(-0.5)}>←</button><button aria-label="later" onClick=${() => move(0.5)}>→</button><button aria-label="zoom in" onClick=${() => zoom(0.5)}>+</button><button aria-label="zoom out" onClick=${() => zoom(2)}>−</button>${!whole && html`<button onClick=${() => (range.value = [0, end])}>all</button>`}</span></header>
    <${Canvas} draw=${draw} height=${TOP + (lanes.length + (measured.value?.lanes.length ?? 0)) * ROW + 4} testid="timeline" events=${TIMELINE} label=${`${lanes.length > 1 ? `${lanes.length} cores` : 'all cores'} from ${f.time(a)} to ${f.time(b)}${pick === null ? '' : `, ${labels[pick]} marked`}`} />
    ${edited.value ? html`<p class="quiet">The plan as edited. Where tensors lie is decided when it is compiled.</p>` : html`<h3>Memory between operators: ${f.bytes(story.arena_bytes)} in place of ${f.bytes(story.tensor_bytes)}</h3>
    <${Canvas} draw=${drawArena} height=${ARENA} testid="arena" events=${MEMORY} label=${`${f.plural(story.buffers.length, 'buffer')} in ${f.bytes(story.arena_bytes)}`} />`}
  </section>`;
}
