// Two plans of a model side by side: what takes other times, how long cores wait, and the memory.
import { html } from 'htm/preact';
import { useEffect, useState } from 'preact/hooks';
import { getJson } from './api.js';
import { DigestForm } from './digestform.js';
import * as f from './format.js';
import { labelOf } from './labels.js';
import { compared, model, picked } from './modelstate.js';
import { diffFigures, diffPlans, findStory } from './plandiff.js';

const FIRST = 10;

const readStory = async (digest, dims) => findStory(await getJson(`/v1/models/${encodeURIComponent(digest)}/story`), dims);

const signed = (seconds) => (seconds < 0 ? `−${f.time(-seconds)}` : `+${f.time(seconds)}`);
const labelOfRow = ({ name, nodes }, stories) => name ?? labelOf(nodes[0].length ? stories[0].nodes[nodes[0][0]] : stories[1].nodes[nodes[1][0]]);

function Difference({ stories }) {
  const [all, setAll] = useState(false), { isSameModel, rows } = diffPlans(stories), [one, other] = stories, figures = diffFigures(stories);
  if (!isSameModel) return html`<p class="bad" role="status">The two have no operator in common: they are plans of different models.</p>`;
  if (!rows.length && !figures.length) return html`<p class="quiet">The two plans take the same times.</p>`;
  const ratio = one.seconds > 0 ? other.seconds / one.seconds - 1 : null;
  return html`<p class="note" data-testid="plan-verdict">A call takes ${f.time(one.seconds)} by this plan and ${f.time(other.seconds)} by the other${ratio === null ? '' : `, ${f.percent(Math.abs(ratio))} ${ratio < 0 ? 'less' : 'more'}`}. The rows below are shares of a call, and their differences add up to that.</p>
    <div class="two"><div class="scroll" tabindex="0" role="group" aria-label="table of operators that differ"><table class="programs" data-testid="plan-differences">
      <thead><tr><th>differs in</th><th class="r">nodes</th><th>kernels</th><th class="r">this plan</th><th class="r">the other</th><th class="r">other − this</th></tr></thead>
      <tbody>${(all ? rows : rows.slice(0, FIRST)).map((row) => html`<tr class=${row.nodes[0].includes(picked.value) ? 'on' : ''}>
        <td>${row.nodes[0].length ? html`<button class="plain" title=${one.nodes[row.nodes[0][0]].name} onClick=${() => (picked.value = row.nodes[0][0])}>${labelOfRow(row, stories)}</button>` : labelOfRow(row, stories)}</td>
        <td class="r">${row.name ? '' : row.nodes.map((each) => each.length).join(' → ')}</td><td>${row.name ? '' : row.isEqual ? 'equal' : 'other'}</td>
        <td class="r">${f.time(row.seconds[0])}</td><td class="r">${f.time(row.seconds[1])}</td><td class="r strong">${signed(row.seconds[1] - row.seconds[0])}</td></tr>`)}</tbody></table>
      ${rows.length > FIRST && html`<button class="more" onClick=${() => setAll(!all)}>${all ? 'fewer' : `all ${rows.length}`}</button>`}</div>
    <div class="scroll" tabindex="0" role="group" aria-label="table of figures that differ"><table class="programs" data-testid="plan-figures"><thead><tr><th>figure</th><th class="r">this plan</th><th class="r">the other</th></tr></thead>
      <tbody>${figures.map(([name, ...values]) => html`<tr><th scope="row">${name}</th>${values.map((value) => html`<td class="r">${value}</td>`)}</tr>`)}</tbody></table></div></div>`;
}

export function ComparePlans() {
  const [answer, setAnswer] = useState(null), { story } = model.value, other = compared.value;
  useEffect(() => {
    let isGone = false;
    setAnswer(null);
    if (other) readStory(other, story.dims).then((read) => isGone || setAnswer({ story: read }), (error) => isGone || setAnswer({ error: error.message }));
    return () => (isGone = true);
  }, [story, other]);
  return html`<section class="panel" aria-labelledby="compare-title"><header><h2 id="compare-title">Compare plans</h2><span class="quiet">of this model, compiled with another plan, device or option</span></header>
    <${DigestForm} chosen=${compared} noun="model" />
    ${answer?.error && html`<p class="bad" role="status">${answer.error}</p>`}
    ${answer?.story && html`<${Difference} stories=${[story, answer.story]} />`}</section>`;
}
