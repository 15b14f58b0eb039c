// The source of a kernel beside its PTX, SASS or assembly: linked lines, and where its numbers and parts come from.
import { html } from 'htm/preact';
import { useEffect, useMemo, useRef, useState } from 'preact/hooks';
import { getJson, getText } from './api.js';
import { tone } from './colours.js';
import * as f from './format.js';
import { linesOf, linkOf, namesOf, partOf, ranges, segments } from './links.js';
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
const tokens = (text) => text.split(TOKEN).map((token) => {
  const kind = token && kindOf(token);
  return kind ? html`<i class=${kind}>${token}</i>` : token;
});

// What the service has of a kernel; the answers stay.
const answers = new Map();
function useAnswer(path, get) {
  const [answer, setAnswer] = useState({});
  useEffect(() => {
    let isGone = false;
    if (!answers.has(path)) answers.set(path, get(path));
    setAnswer({});
    answers.get(path).then((value) => isGone || setAnswer({ value }), (error) => {
      answers.delete(path);
      if (!isGone) setAnswer({ error: error.message });
    });
    return () => (isGone = true);
  }, [path]);
  return answer;
}

const SHOWN_RANGES = 6;
const where = (lines) => {
  const all = ranges(lines), shown = all.slice(0, SHOWN_RANGES).join(', ');
  return all.length > SHOWN_RANGES ? `${shown} and ${all.length - SHOWN_RANGES} more` : shown;
};

const NOTHING = { parts: [], numbers: [], links: [] };

// A listing whose lines are chosen by a click or the arrow keys. The lines are drawn once; marks are put on them.
function Pane({ kind, text, draw, start, marks, hovered, cursor, choose, hover, others }) {
  const pre = useRef(null), box = useRef(null);
  const lines = useMemo(() => text.split('\n').map((line, i) => html`<span class="line" data-line=${i + 1}><i class="at">${i + 1}</i>${draw(line, i + 1)}${'\n'}</span>`), [text, draw]);
  const count = lines.length;
  useEffect(() => mark(pre.current, 'linked', marks), [lines, marks]);
  useEffect(() => mark(pre.current, 'near', hovered), [lines, hovered]);
  useEffect(() => {
    mark(pre.current, 'here', cursor ? [cursor] : []);
    const first = cursor ?? marks[0] ?? start;
    if (first) reveal(box.current, pre.current.children[first - 1]);
  }, [lines, cursor, marks]);
  const onKey = (event) => {
    const at = cursor ?? marks[0] ?? 1;
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 20, PageUp: at - 20, Home: 1, End: count }[event.key];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || (next === undefined && !step && event.key !== 'Enter')) return;
    event.preventDefault();
    event.stopPropagation(); // the arrows step through tiles elsewhere
    if (next !== undefined) choose(Math.min(Math.max(next, 1), count));
    else if (step) choose(at, step);
    else others?.current?.querySelector('.listing')?.focus();
  };
  const lineAt = (event) => Number(event.target.closest('.line')?.dataset.line) || null;
  const numberAt = (event) => Number(event.target.closest('[data-number]')?.dataset.number ?? NaN);
  return html`<div class="listing" ref=${box} data-testid=${kind} tabindex="0" role="group" aria-label=${`${kind}: arrows choose a line, Enter goes to the other text`}
      onKeyDown=${onKey} onClick=${(event) => lineAt(event) && choose(lineAt(event), 0, numberAt(event))} onMouseOver=${(event) => hover(lineAt(event))} onMouseLeave=${() => hover(null)}><pre ref=${pre}>${lines}</pre></div>`;
}

function mark(pre, name, lines) {
  for (const each of pre.querySelectorAll(`.${name}`)) each.classList.remove(name);
  for (const line of lines) pre.children[line - 1]?.classList.add(name);
}

function reveal(box, line) {
  if (!line) return;
  const top = line.offsetTop - box.offsetTop, margin = 3 * line.offsetHeight;
  if (top < box.scrollTop + margin || top + line.offsetHeight > box.scrollTop + box.clientHeight - margin) box.scrollTop = top - box.clientHeight / 3;
}

const levelOf = (number) => number.sources.map((name) => name.split('.')[0]).find((name) => state.story.value?.device.tile_levels.includes(name));
const colourOf = (number) => {
  const level = levelOf(number);
  return level ? tone(state.story.value.device, level) : undefined;
};
const sayNumber = (number) => number.formula || `computed from ${number.sources.join(', ')}`;

export function Code({ kernel }) {
  const listings = kernel.language === 'cuda' ? ['ptx', 'sass'] : kernel.language === 'c' ? ['assembly'] : [];
  const kind = listings.includes(state.listing.value) ? state.listing.value : 'source', base = `/v1/kernels/${kernel.digest}`;
  const source = useAnswer(`${base}/source`, getText), annotations = useAnswer(`${base}/annotations`, getJson);
  return html`<div class="choices">${['source', ...listings].map((each) => html`<button aria-pressed=${each === kind} onClick=${() => (state.listing.value = each)}>${each}</button>`)}</div>
    ${source.error && html`<p class="bad" role="status">${source.error}</p>`}
    ${source.value !== undefined
      ? html`<${Linked} key=${`${kernel.digest} ${kind}`} base=${base} kind=${kind} source=${source.value} annotations=${annotations.value ?? NOTHING} fault=${annotations.error} />`
      : !source.error && html`<p class="quiet" role="status">Reading source…</p>`}`;
}

// A listing beside the source, once it is there.
function Linked({ base, kind, ...others }) {
  if (kind === 'source') return html`<${Texts} kind=${kind} links=${NOTHING} ...${others} />`;
  return html`<${WithListing} path=${`${base}/${kind}`} kind=${kind} ...${others} />`;
}

function WithListing({ path, kind, ...others }) {
  const listing = useAnswer(path, getText), links = useAnswer(`${path}-links`, getJson);
  if (listing.error) return html`<p class="bad" role="status">${listing.error}</p>`;
  if (listing.value === undefined) return html`<p class="quiet" role="status">Reading ${kind}…</p>`;
  const note = links.value?.note || links.error || (links.value ? '' : 'Linking lines…');
  return html`<${Texts} kind=${kind} listing=${listing.value} links=${links.value ?? NOTHING} note=${note} ...${others} />`;
}

function Texts({ kind, source, listing, links, annotations, note, fault }) {
  const [cursor, setCursor] = useState(state.line.value ? { pane: 'source', line: state.line.value } : null), [near, setNear] = useState(null);
  const [number, setNumber] = useState(null), frame = useRef(null), other = useRef(null);
  const byLine = useMemo(() => Map.groupBy(annotations.numbers, (each) => each.line), [annotations]);
  const drawSource = useMemo(() => (text, line) => segments(text, byLine.get(line) ?? []).map((part, i) => typeof part === 'string' ? tokens(part)
    : html`<i class="derived" data-number=${part.index} title=${`${part.text} = ${sayNumber(part.number)}`} style=${{ color: colourOf(part.number) }}>${part.text}</i>`), [byLine]);
  const drawPart = useMemo(() => (text, line) => {
    const part = partOf(annotations.parts, line);
    return part ? html`<i class="part" data-part=${part.name} title=${part.name}></i>${drawSource(text, line)}` : drawSource(text, line);
  }, [annotations, drawSource]);
  const drawListing = useMemo(() => (text) => tokens(text), []);
  const linked = (place) => {
    if (!place) return { source: [], listing: [] };
    const lines = place.pane === 'source' ? [place.line] : linkOf(links.links, place.line)?.source ?? [];
    return { source: place.pane === 'source' ? [] : lines, listing: lines.length ? linesOf(links.links, lines.at(-1)) : [] };
  };
  const marks = useMemo(() => linked(cursor), [cursor, links]), hovered = useMemo(() => linked(near), [near, links]);
  const choose = (pane) => (line, step = 0, index = NaN) => {
    const own = pane === 'source' ? byLine.get(line) ?? [] : [];
    if (step && own.length) setNumber(own[(own.indexOf(number) + step + own.length) % own.length] ?? own[0]);
    else setNumber(Number.isNaN(index) ? null : own[index] ?? null);
    setCursor({ pane, line });
    state.line.value = pane === 'source' ? line : linkOf(links.links, line)?.source.at(-1) ?? 0;
  };
  const hover = (pane) => (line) => setNear(line ? { pane, line } : null);
  const chosenLine = cursor && (cursor.pane === 'source' ? cursor.line : marks.source.at(-1)), part = chosenLine && partOf(annotations.parts, chosenLine);
  const facts = [
    cursor && `${cursor.pane === 'source' ? 'line' : `${kind} line`} ${cursor.line}`,
    part?.name,
    cursor?.pane === 'listing' && (marks.source.length ? `source ${marks.source.join(', called at ')}` : 'from no line of the source'),
    cursor && kind !== 'source' && marks.listing.length > 0 && `${f.plural(marks.listing.length, 'line')} of ${kind}: ${where(marks.listing)}`,
  ].filter(Boolean);
  const said = number && `${source.split('\n')[number.line - 1].substr(number.column, number.length)} = ${sayNumber(number)}`;
  const values = number && namesOf(number, state.built.value);
  return html`<div class="text" ref=${frame}>
    ${(annotations.parts.length > 0 || annotations.numbers.length > 0) && html`<div class="choices parts" data-testid="parts">${annotations.parts.map((each) => html`<button onClick=${() => choose('source')(each.first)}><i class="part" data-part=${each.name}></i>${each.name} <small>${each.first}–${each.last}</small></button>`)}
      <span class="quiet">${f.plural(annotations.numbers.length, 'number')} of a tile, a stage or a layout: <i class="derived">underlined</i></span></div>`}
    ${(annotations.note || fault || note) && html`<p class="quiet">${[annotations.note || fault, note].filter(Boolean).join(' · ')}</p>`}
    <p class="facts-line" role="status" data-testid="linked">${facts.join(' · ')}${said && html` · <b data-testid="number">${said}</b>${values && html` <span class="quiet">${values}</span>`}`}</p>
    <div class=${listing === undefined ? 'panes' : 'panes double'}>
      <div>
        <${Pane} kind="source" text=${source} draw=${drawPart} start=${annotations.parts[0]?.first} marks=${marks.source} hovered=${hovered.source} cursor=${cursor?.pane === 'source' ? cursor.line : null} choose=${choose('source')} hover=${hover('source')} others=${other} />
      </div>
      ${listing !== undefined && html`<div ref=${other}>
        <${Pane} kind=${kind} text=${listing} draw=${drawListing} marks=${marks.listing} hovered=${hovered.listing} cursor=${cursor?.pane === 'listing' ? cursor.line : null} choose=${choose('listing')} hover=${hover('listing')} others=${frame} />
      </div>`}
    </div></div>`;
}
