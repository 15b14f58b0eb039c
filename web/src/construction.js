// How the tile grew: one search at a time, step by step.
import { html } from 'htm/preact';
import { useEffect } from 'preact/hooks';
import { colour, tone } from './colours.js';
import * as f from './format.js';
import { Landscape, Marks, isAccepted, isGrowing } from './landscape.js';
import { look, mainKernel, search, step, story } from './state.js';
import { Tiles } from './tiles.js';

const EDITABLE = '.cm-editor, input, select, textarea';

// Rules name a memory level, or what there is of something else: registers, threads.
function limitText({ rule, needs, has }) {
  const isOfLevel = story.value.device.levels.some(({ name }) => rule === name || rule.startsWith(`${name} `));
  const show = isOfLevel || /memory|cache|page/.test(rule) ? f.bytes : f.count;
  return `${rule}: needs ${show(needs)}, there is ${show(has)}`;
}

function changed(tried, tile) {
  const parent = tried.steps[tile.parent];
  if (!parent) return tried.kind === 'scale-up' ? 'Start' : 'Tried';
  if (tile.axis == null) return `Made of ${f.tile(tried.axes, parent.tile)}`;
  const before = parent.tile[tile.axis], after = tile.tile[tile.axis];
  return `${tried.axes[tile.axis]} ${after > before ? 'grew' : 'shrank'} ${before} → ${after}`;
}

function Saying({ tried, tile }) {
  const did = changed(tried, tile);
  const share = tile.footprint_bytes > 0 && tried.capacity_bytes > 0 ? `, ${f.percent(tile.footprint_bytes / tried.capacity_bytes)} of the capacity` : '';
  if (tile.outcome === 'rejected') return html`<b>${did}</b>: <span class="bad">stopped by ${tile.limit ? limitText(tile.limit) : tile.outcome}</span>.`;
  if (!isAccepted(tile)) return html`<b>${did}</b>: not aligned yet (${limitText(tile.limit)}), so it grows on.`;
  const fits = tile.footprint_bytes > 0 ? `fits in ${f.bytes(tile.footprint_bytes)}${share}.` : 'fits.';
  const enough = tried.kind !== 'scale-up' ? '' : isGrowing(tried, tile)
    ? ' Memory is still slower than compute: growing pays.' : ' Compute covers its memory time: it is large enough.';
  return html`<b>${did}</b>: ${fits}${enough}${tile.seconds > 0 && html` The best program with it takes <b>${f.time(tile.seconds)}</b>.`}`;
}

function Alternatives({ tried, tile }) {
  if (!tile.growth?.length) return null;
  const most = Math.max(1e-30, ...tile.growth.map((each) => each.reuse ?? 0));
  return html`<table class="growth"><caption>It could grow along</caption>
    <thead><tr><th>axis</th><th>to</th><th class="r">needs</th><th class="r">moves</th><th>traffic saved per byte</th><th>outcome</th></tr></thead>
    <tbody>${tile.growth.map((each, i) => html`<tr class=${i === 0 ? 'first' : ''}>
      <th scope="row">${tried.axes[each.axis]}</th><td>${each.extent}</td>
      <td class="r">${each.footprint_bytes > 0 ? f.bytes(each.footprint_bytes) : '–'}</td>
      <td class="r">${each.traffic_bytes > 0 && tile.traffic_bytes > 0 ? f.percent(each.traffic_bytes / tile.traffic_bytes) : '–'}</td>
      <td class="meter"><i style=${`width:${each.reuse == null ? 100 : Math.max(1, (100 * each.reuse) / most)}%;background:${colour(story.value.device, tried.level)}`}></i></td>
      <td class=${each.limit ? 'bad' : 'quiet'}>${each.limit ? limitText(each.limit) : each.reuse == null ? 'costs nothing' : i === 0 ? 'tried first' : ''}</td></tr>`)}</tbody></table>`;
}

// All searches, by unit and family; a dot marks those of the chosen program.
function Picker() {
  const found = new Set((mainKernel.value?.found ?? []).map((each) => each.search)), groups = new Map();
  story.value.searches.forEach((tried, i) => {
    const name = [tried.group, tried.unit, tried.view, tried.family].filter(Boolean).join(' · ');
    groups.set(name, [...(groups.get(name) ?? []), [tried, i]]);
  });
  return html`<select class="picker" aria-label="search" value=${search.value} onChange=${(e) => look(Number(e.target.value), 0)}>
    ${[...groups].map(([name, list]) => html`<optgroup label=${name}>${list.map(([tried, i]) => html`<option value=${i} selected=${i === search.value}>
      ${found.has(i) ? '● ' : ''}${tried.kind} · ${tried.level}${tried.base ? ` on ${tried.base.filter((n) => n > 1).join('×') || '1'}` : ''}: ${f.plural(tried.steps.length, 'tile')}</option>`)}</optgroup>`)}</select>`;
}

const Chain = () => html`<div class="chain" role="group" aria-label="tiles of the chosen program">
  ${(mainKernel.value?.found ?? []).map((each) => {
    const { level } = story.value.searches[each.search];
    return html`<button class=${each.search === search.value && each.step === step.value ? 'on' : ''} style=${`--c:${tone(story.value.device, level)}`} onClick=${() => look(each.search, each.step)}>chosen ${level}</button>`;
  })}</div>`;

export function Construction() {
  const tried = story.value.searches[search.value], last = (tried?.steps.length ?? 0) - 1, now = Math.min(step.value, last);
  const move = (by) => look(search.value, Math.max(0, Math.min(last, now + by)));
  useEffect(() => {
    const onKey = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by && !event.target.closest?.(EDITABLE) && !event.altKey && !event.metaKey && !event.ctrlKey) move(by);
    };
    addEventListener('keydown', onKey);
    return () => removeEventListener('keydown', onKey);
  });
  if (last < 0) return html`<section class="panel"><h2>How the tile grew</h2><p class="quiet">This program has no tiles to choose.</p></section>`;
  const tile = tried.steps[now];
  return html`<section class="panel" aria-labelledby="construction-title" data-testid="stepper">
    <header><h2 id="construction-title">How the tile grew</h2><${Picker} /><${Chain} /></header>
    <div class="two"><div>
        <${Landscape} tried=${tried} now=${now} /><${Marks} tried=${tried} />
        <div class="scrubber">
          <button data-testid="step-previous" aria-label="previous step" disabled=${now === 0} onClick=${() => move(-1)}>←</button>
          <input type="range" min="0" max=${last} value=${now} aria-label="step" onInput=${(e) => look(search.value, Number(e.target.value))} />
          <button data-testid="step-next" aria-label="next step" disabled=${now === last} onClick=${() => move(1)}>→</button>
          <span>${now + 1} of ${last + 1}</span></div>
        <p class="saying" aria-live="polite" data-testid="step"><code>${f.tile(tried.axes, tile.tile)}</code> <${Saying} tried=${tried} tile=${tile} /></p>
        <${Alternatives} tried=${tried} tile=${tile} /></div>
      <${Tiles} tried=${tried} tile=${tile} /></div>
  </section>`;
}
