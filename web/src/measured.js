// A profile of a model beside its story: `roller model profile --json` on the machine that runs it.
import { html } from 'htm/preact';
import { useState } from 'preact/hooks';
import { profile, setProfile, stored } from './modelstate.js';
import { matchProfile, readProfile } from './profile.js';

export function Measured() {
  const [fault, setFault] = useState('');
  const take = async (file) => {
    if (!file) return;
    try {
      const steps = readProfile(await file.text());
      matchProfile(stored.value, steps); // else it is another plan's
      setProfile(steps);
      setFault('');
    } catch (error) {
      setFault(`${file.name}: ${error.message}`);
    }
  };
  const drop = (event) => {
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  };
  return html`<div class="choices measure" onDragOver=${(event) => event.preventDefault()} onDrop=${drop}>
    <label>measured: output of roller model profile --json <input type="file" accept=".json" data-testid="profile" onChange=${(event) => take(event.currentTarget.files[0])} /></label>
    ${profile.value && html`<button onClick=${() => setProfile(null)}>without</button>`}
    ${fault && html`<p class="bad" role="alert" data-testid="profile-fault">${fault}</p>`}</div>`;
}
