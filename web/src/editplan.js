// Edits the plan of a model by hand: the service checks it, and estimates it anew.
import { html } from 'htm/preact';
import { useEffect, useRef, useState } from 'preact/hooks';
import { batch } from '@preact/signals';
import { getJson, post } from './api.js';
import { addWait, dropWait, findKey, isVerdict, moveBy, moveToCore, placeOf, readChecked, readPrograms, startsOf, writePlan, writePrograms } from './edit.js';
import * as f from './format.js';
import { labelOf } from './labels.js';
import { bucket, edited, model, picked, setEdited, stored } from './modelstate.js';
import { problemOf } from './problem.js';

function nameOf(launches, instruction) {
  const [veu, order] = placeOf(launches, instruction), [, first, count] = instruction.execute;
  return `core ${veu}, number ${order}: ${count === 1 ? `rTask ${first}` : `rTasks ${first} to ${first + count - 1}`}`;
}

// Nodes that a node reads; views are seen through.
function readNodes({ nodes, edges }, number) {
  const found = new Set(), see = (target) => {
    for (const { from } of edges.filter(({ to }) => to === target)) nodes[from].view ? see(from) : found.add(from);
  };
  see(number);
  return [...found];
}

function Result({ story, fault, isChecking, ask }) {
  if (isChecking) return html`<p class="quiet" role="status">Checking…</p>`;
  if (fault && !isVerdict(fault)) return html`<p class="bad" role="alert" data-testid="edit-unanswered">The service did not say whether the plan is legal: ${fault.detail}. The timeline has the last plan that is legal. <button data-testid="edit-again" onClick=${ask}>ask again</button></p>`;
  if (fault) return html`<p class="bad" role="alert" data-testid="edit-fault">${fault.detail}. The timeline has the last plan that is legal.</p>`;
  if (!edited.value) return html`<p class="quiet" role="status">Not changed yet.</p>`;
  const { seconds } = edited.value, off = seconds - story.seconds;
  return html`<p class="note" role="status" data-testid="edited">Legal: a call takes ${f.time(seconds)}, ${off === 0 ? 'as before' : `${f.time(Math.abs(off))} ${off < 0 ? 'less' : 'more'} than before`}. Memory is placed again when it is compiled.</p>`;
}

export function EditPlan({ digest }) {
  const [draft, setDraft] = useState(null), [chosen, setChosen] = useState(null), [fault, setFault] = useState(null), [isChecking, setChecking] = useState(false), [shown, setShown] = useState('');
  const told = stored.value, at = bucket.value, { story } = model.value, asked = useRef(0); // asked: the last request counts
  const stop = () => {
    asked.current++;
    batch(() => {
      setDraft(null);
      setFault(null);
      setChecking(false);
      setShown('');
      setEdited(null);
    });
  };
  useEffect(() => stop, [digest, told]);
  const begin = async () => {
    const number = ++asked.current;
    try {
      const read = await getJson(`/v1/models/${encodeURIComponent(digest)}/plan`), plan = read.buckets ? read.buckets[at] : read, launches = readPrograms(plan);
      if (number !== asked.current) return;
      setDraft({ plan, programs: writePrograms(launches), starts: startsOf(launches, told.instructions), past: [] });
      setFault(null);
    } catch (error) {
      if (number === asked.current) setFault(problemOf(error));
    }
  };
  const check = async (next) => {
    const number = ++asked.current;
    setDraft(next);
    setShown('');
    setChecking(true);
    try {
      const answer = readChecked(await post('/v1/plans:check', { model: digest, bucket: at, programs: next.programs }));
      if (number !== asked.current) return;
      setEdited(answer);
      setDraft({ ...next, starts: startsOf(readPrograms(next.plan, next.programs), answer.instructions) });
      setFault(null);
    } catch (error) {
      if (number === asked.current) setFault(problemOf(error));
    }
    if (number === asked.current) setChecking(false);
  };
  if (!draft) {
    return html`<section class="panel" aria-labelledby="edit-title"><header><h2 id="edit-title">Edit the plan</h2><span class="quiet">move rTasks and waits; the service checks and estimates it</span><button data-testid="edit" onClick=${begin}>edit</button></header>
      ${fault && html`<p class="bad" role="alert">${fault.detail}</p>`}</section>`;
  }
  const launches = readPrograms(draft.plan, draft.programs), node = story.nodes[picked.value], own = launches.flat(2).filter((each) => each.key && each.node === node?.name);
  const instruction = own.find((each) => each.key === chosen) ?? own[0];
  const change = (run) => {
    const next = readPrograms(draft.plan, draft.programs);
    if (run(next, findKey(next, instruction.key))) check({ ...draft, programs: writePrograms(next), past: [...draft.past, draft.programs] });
  };
  const undo = () => check({ ...draft, programs: draft.past.at(-1), past: draft.past.slice(0, -1) });
  const copy = async () => {
    const text = JSON.stringify(writePlan(draft.plan, draft.programs));
    if (!navigator.clipboard) return setShown(text); // neither https nor localhost
    await navigator.clipboard.writeText(text);
    setShown('copied');
  };
  const [veu, order] = instruction ? placeOf(launches, instruction) : [], program = instruction && launches[instruction.launch][veu];
  return html`<section class="panel" aria-labelledby="edit-title" data-testid="edit-panel"><header><h2 id="edit-title">Edit the plan</h2><span class="quiet">of the chosen operator</span>
      <span class="choices"><button disabled=${!draft.past.length} onClick=${undo}>undo</button><button onClick=${stop}>end</button><button data-testid="copy-plan" disabled=${!!fault || isChecking} onClick=${copy}>copy plan</button></span></header>
    ${!instruction && html`<p class="quiet">${node ? `No instruction of a core executes ${labelOf(node)}: all cores do, one operator after the other.` : 'Choose an operator in the timeline.'}</p>`}
    ${instruction && html`<div class="choices"><label>${labelOf(node)} <select data-testid="instruction" value=${instruction.key} onChange=${(event) => setChosen(event.target.value)}>${own.map((each) => html`<option value=${each.key}>${nameOf(launches, each)}</option>`)}</select></label>
      <button disabled=${launches[instruction.launch].length < 2} onClick=${() => change((next, each) => moveToCore(next, each, 1, draft.starts))}>to the next core</button>
      <button disabled=${!program[order - 1]} onClick=${() => change((next, each) => moveBy(next, each, -1))}>earlier</button><button disabled=${!program[order + 1]} onClick=${() => change((next, each) => moveBy(next, each, 1))}>later</button>
      <button disabled=${!program[order - 1]?.wait} onClick=${() => change(dropWait)}>drop the wait before it</button>
      ${readNodes(story, picked.value).map((number) => html`<button onClick=${() => change((next, each) => addWait(next, each, story.nodes[number].name))}>wait for ${labelOf(story.nodes[number])}</button>`)}</div>`}
    <${Result} story=${told} fault=${fault} isChecking=${isChecking} ask=${() => check(draft)} />
    ${shown && html`<p class="quiet" role="status">${shown === 'copied' ? 'Copied: compile_model(source, plan=json.loads(text)) compiles it.' : html`<textarea readonly aria-label="plan" rows="6">${shown}</textarea>`}</p>`}</section>`;
}
