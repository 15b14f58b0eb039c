// The device's spec, changed by sliders or by hand.
import { html } from 'htm/preact';
import { useEffect, useState } from 'preact/hooks';
import * as f from './format.js';
import { post } from './api.js';
import { STEP, resourcesOf } from './scale.js';
import * as state from './state.js';

const OCTAVES = 2; // of a slider: a quarter to four times

function Slider({ name }) {
  const factor = state.factors.value[name] ?? 1;
  return html`<label class="slider"><span>${name}</span>
    <input type="range" min=${-OCTAVES} max=${OCTAVES} step=${STEP} value=${Math.log2(factor)} aria-label=${name} aria-valuetext=${f.times(factor)}
      onChange=${(e) => state.setFactor(name, 2 ** Number(e.target.value))} /><em>${f.times(factor)}</em></label>
    ${state.held.value?.name === name && html`<p class="quiet" data-testid="held" role="status">no further: ${state.held.value.reason}</p>`}`;
}

const tilesOf = ({ kernels }) => JSON.stringify(kernels.map((kernel) => kernel.program?.tiles ?? kernel.tiles));

// What the change does to the best program, against the device as it is.
function Effect() {
  const before = state.elsewhere.value.find((each) => each.target === state.target.value)?.candidates?.[0];
  const after = state.story.value?.programs[0];
  if (!state.hardware.value || !before || state.isElsewhereOld.value || state.explained.value !== state.body.value) return null;
  const saved = 1 - after.seconds / before.seconds;
  return html`<p data-testid="effect" role="status">${f.time(before.seconds)} → <b>${f.time(after.seconds)}</b>,${' '}
    ${Math.abs(saved) < 5e-4 ? 'as before' : `${f.percent(Math.abs(saved))} ${saved > 0 ? 'less' : 'more'}`};${' '}
    ${tilesOf(before) === tilesOf(after) ? 'the tiles stay' : 'other tiles win'}.</p>`;
}

// The whole spec as JSON text, checked by the service.
function Text() {
  const current = state.hardware.value ?? state.spec.value;
  const [draft, setDraft] = useState(null), [problem, setProblem] = useState(null); // a draft stays while it has errors
  const change = async (event) => {
    setDraft(event.target.value);
    try {
      const { hardware } = await post('/v1/hardware:validate', { hardware: event.target.value });
      setProblem(null);
      setDraft(null);
      state.setSpec(hardware);
    } catch (error) {
      setProblem(error.problem ?? { detail: error.message, errors: [] });
    }
  };
  const errors = problem && (problem.errors.length ? problem.errors : [{ message: problem.detail }]);
  return html`<details><summary>as text</summary>
    <textarea aria-label="spec as text" rows="12" spellcheck="false" value=${draft ?? JSON.stringify(current, null, 1)} onChange=${change}></textarea>
    ${errors?.map((error) => html`<p class="bad" role="alert">${error.line && html`<b>${error.line}:${error.column}</b> `}${error.message}</p>`)}</details>`;
}

export function Spec() {
  const spec = state.hardware.value ?? state.spec.value, [isOpen, setOpen] = useState(false);
  const onToggle = ({ currentTarget: { open } }) => setOpen(open);
  useEffect(() => { // of another target, too
    if (isOpen && !spec) state.loadSpec();
  }, [isOpen, spec, state.target.value]);
  return html`<details class="spec" data-testid="spec" open=${isOpen || state.hardware.value !== null} onToggle=${onToggle}>
    <summary>Another device: what if …</summary>
    ${spec && html`${Object.keys(resourcesOf(spec)).map((name) => html`<${Slider} name=${name} />`)}<${Effect} />
      ${state.hardware.value && state.devices.value.some((device) => device.id === state.target.value) && html`<button onClick=${() => state.setTarget(state.target.value)}>as it is</button>`}<${Text} />`}
  </details>`;
}
