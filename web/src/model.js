// The page of a model: what its time goes to, its operators, when each core does what, and its memory.
import { html } from 'htm/preact';
import { useState } from 'preact/hooks';
import * as f from './format.js';
import { Graph } from './graph.js';
import { labelOf } from './labels.js';
import { Measured } from './measured.js';
import { bucket, chooseBucket, edited, hasService, kernelLink, measured, model, picked, stories } from './modelstate.js';
import { errorOf, sayError } from './profile.js';
import { Timeline } from './timeline.js';

const FIRST = 8;

function sentences({ story, hot, labels, waiting, busy }) {
  const [first] = hot, views = story.nodes.filter((node) => node.view).length;
  const before = story.passes[0]?.nodes_before, cut = [...story.passes].sort((a, b) => a.nodes_after - a.nodes_before - (b.nodes_after - b.nodes_before))[0];
  const copies = story.steps.filter((step) => step.kind === 'copy').length, synchronized = story.instructions.find((each) => each.kind === 'synchronize');
  const gains = hot.filter((each) => each.above_s > 0).sort((a, b) => b.above_s - a.above_s), [gain] = gains;
  return [
    first && `${labels[first.nodes[0]]} takes ${f.percent(first.total / story.nodes.reduce((sum, node) => sum + node.seconds, 0))} of the time of all operators: ${f.plural(first.nodes.length, 'node')} of ${f.time(first.total / first.nodes.length)} each.`,
    gain && `Rewriting ${labels[gain.nodes[0]]} of ${f.time(gain.total / gain.nodes.length)}, ${f.plural(gain.nodes.length, 'node')}, would save most, at most ${f.time(gain.above_s)}: its kernel takes ${f.times(gain.kernel.seconds / gain.kernel.floor_seconds)} the floor of its program.`,
    story.veus > 1 && `Cores wait ${f.percent(waiting)} of the call; the busiest works ${f.percent(Math.max(...busy))} of it, the least busy ${f.percent(Math.min(...busy))}.`,
    synchronized && `${f.time(synchronized.end_s - synchronized.start_s)} are launches, signals and waits beside the work of operators.`,
    before && `${f.plural(before, 'node')} became ${f.count(story.passes.at(-1).nodes_after)}${cut && cut.nodes_after < cut.nodes_before ? `; ${cut.name.replaceAll('_', ' ')} removed ${f.count(cut.nodes_before - cut.nodes_after)}` : ''}${views ? `. ${f.plural(views, 'view')} cost nothing` : ''}.`,
    copies > 0 && `${f.count(copies)} of ${f.plural(story.steps.length, 'step')} ${copies === 1 ? 'is a copy' : 'are copies'}.`,
    story.arena_bytes > 0 && `Tensors between operators share ${f.bytes(story.arena_bytes)} in place of ${f.bytes(story.tensor_bytes)}.`,
  ].filter(Boolean);
}

function Passes({ passes }) {
  const most = Math.max(1, ...passes.map((each) => each.nodes_before));
  return html`<div class="passes"><h3>Nodes after each pass</h3><table><tbody>${passes.map((each) => html`<tr>
    <th scope="row">${each.name.replaceAll('_', ' ')}</th><td class="meter"><i style=${`width:${(100 * each.nodes_after) / most}%;background:${each.nodes_after < each.nodes_before ? 'var(--block)' : 'var(--other)'}`}></i></td>
    <td class="r">${f.count(each.nodes_after)}</td></tr>`)}</tbody></table></div>`;
}

function Summary() {
  const { story } = model.value;
  return html`<section class="panel verdict" aria-labelledby="model-title" data-testid="verdict">
    <header><h2 id="model-title">${story.name}</h2><span class="quiet">on ${story.device || story.target}, plan ${story.plan}${edited.value ? ', edited' : ''}, by the performance model</span>
      ${stories.value.length > 1 && html`<select aria-label="bucket" value=${bucket.value} onChange=${(event) => chooseBucket(Number(event.target.value))}>${stories.value.map((each, i) => html`<option value=${i}>${f.dims(each.dims)}</option>`)}</select>`}</header>
    <div class="why"><div>
      <div class="headline"><span class="big" data-testid="estimate">${f.time(story.seconds)}</span>
        <dl><div><dt>operators</dt><dd>${f.count(story.nodes.filter((node) => !node.view).length)}</dd></div><div><dt>kernels</dt><dd>${f.count(story.kernels.length)}</dd></div><div><dt>steps</dt><dd>${f.count(story.steps.length)}</dd></div>
        ${story.veus > 1 && html`<div><dt>cores</dt><dd>${story.veus}</dd></div>`}<div><dt>memory</dt><dd>${f.bytes(story.arena_bytes)}</dd></div></dl></div>
      <ul class="sentences">${sentences(model.value).map((each) => html`<li>${each}</li>`)}</ul></div>
      <${Passes} passes=${story.passes} /></div>
  </section>`;
}

function Hot() {
  const [all, setAll] = useState(false), { hot, labels, story } = model.value, timed = measured.value;
  const sumOf = (seconds, { nodes }) => nodes.reduce((sum, node) => sum + seconds[node], 0);
  const whole = hot.reduce((sum, each) => sum + each.total, 0) || 1, most = hot[0]?.total || 1;
  return html`<section class="panel" aria-labelledby="hot-title"><header><h2 id="hot-title">Where the time goes</h2><span class="quiet">equal operators share a kernel; loops have kernels of their own</span></header>
    <${Measured} />
    ${timed && html`<p class="note" data-testid="measured">The measured call takes ${f.time(timed.end_s)}; ${sayError(timed.predicted_s, timed.end_s)}.${edited.value ? ' Predicted is the plan before it was edited.' : ''}${timed.others > 0 ? ` ${f.time(timed.others)} of it are of no operator here: steps inside of loops, and copies of results.` : ''}</p>`}
    <div class="scroll" tabindex="0" role="group" aria-label="table of kernels"><table class="programs hot" data-testid="operators">
      <thead><tr><th>operator</th><th class="r">uses</th><th class="r">each</th><th class="r">all</th><th class="wide">share</th><th class="r" title="seconds of the kernel over the least of any kernel of its program">of floor</th>${timed && html`<th class="r" title="of all cores, in this plan">predicted</th><th class="r" title="of all cores">measured</th><th class="r">predicted is</th>`}${hasService.value && html`<th>why</th>`}</tr></thead>
      <tbody>${(all ? hot : hot.slice(0, FIRST)).map((each) => html`<tr key=${each.key} class=${each.nodes.includes(picked.value) ? 'on' : ''} onClick=${() => (picked.value = each.nodes[0])}>
        <td><button class="plain" aria-pressed=${each.nodes.includes(picked.value)}>${labels[each.nodes[0]]}</button></td>
        <td class="r">${f.count(each.nodes.length)}</td><td class="r">${f.time(each.total / each.nodes.length)}</td><td class="r strong">${f.time(each.total)}</td>
        <td class="wide meter"><i style=${`width:${(100 * each.total) / most}%;background:var(--thread)`}></i>${f.percent(each.total / whole)}</td>
        <td class="r">${each.kernel?.floor_seconds ? f.times(each.kernel.seconds / each.kernel.floor_seconds) : '–'}</td>
        ${timed && html`<td class="r">${f.time(sumOf(timed.predicted, each))}</td><td class="r">${f.time(sumOf(timed.seconds, each))}</td><td class="r">${errorOf(sumOf(timed.predicted, each), sumOf(timed.seconds, each))}</td>`}
        ${hasService.value && html`<td>${each.kernel && html`<a href=${kernelLink(each.kernel, story.target)}>tiles</a>`}</td>`}</tr>`)}</tbody></table></div>
    ${hot.length > FIRST && html`<button class="more" onClick=${() => setAll(!all)}>${all ? 'fewer' : `all ${hot.length}`}</button>`}</section>`;
}

const named = (list) => list.slice(0, 6).join(', ') + (list.length > 6 ? ` and ${list.length - 6} more` : '');

function Detail() {
  const { story, used, buffers } = model.value, number = picked.value;
  if (number === null) return html`<section class="panel" aria-labelledby="node-title"><h2 id="node-title">No operator chosen</h2><p class="quiet">Choose one in the table, the graph or the timeline: all three mark it, and its memory.</p></section>`;
  const node = story.nodes[number], kernel = story.kernels[node.kernel], mine = (steps) => steps.some((step) => used[number].has(step));
  const own = story.instructions.filter((each) => used[number].has(each.step)), cores = new Set(own.map((each) => each.veu).filter((veu) => veu != null));
  const reads = buffers.filter((each) => mine(each.read_by)).map((each) => each.name), writes = buffers.filter((each) => mine(each.written_by)).map((each) => each.name);
  return html`<section class="panel node" aria-labelledby="node-title" data-testid="node" aria-live="polite">
    <header><h2 id="node-title">${labelOf(node)}</h2><button onClick=${() => (picked.value = null)}>clear</button></header>
    <p class="mono break">${node.name}</p>
    ${kernel && html`<pre tabindex="0">${kernel.expression.replaceAll('; ', '\n')}</pre>`}
    <dl class="lines"><div><dt>takes</dt><dd>${f.time(node.seconds)}</dd></div>
      ${measured.value && html`<div><dt>measured</dt><dd>${f.time(measured.value.seconds[number])} of all cores; ${sayError(measured.value.predicted[number], measured.value.seconds[number])}</dd></div>`}
      <div><dt>result</dt><dd>${node.result}</dd></div>
      ${own.length > 0 && html`<div><dt>runs</dt><dd>${f.time(own[0].start_s)} to ${f.time(Math.max(...own.map((each) => each.end_s)))}${cores.size > 0 ? ` on ${f.plural(cores.size, 'core')}` : ''}</dd></div>`}
      ${reads.length > 0 && html`<div><dt>reads</dt><dd class="reads">${named(reads)}</dd></div>`}
      ${writes.length > 0 && html`<div><dt>writes</dt><dd class="writes">${named(writes)}</dd></div>`}</dl>
    ${kernel && hasService.value && html`<p><a data-testid="kernel-link" href=${kernelLink(kernel, story.target)}>why this tile: open its kernel</a></p>`}</section>`;
}

export const ModelView = () => html`<${Summary} /><div class="two"><${Hot} /><${Detail} /></div><${Graph} /><${Timeline} />`;
