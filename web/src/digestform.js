// A field for the link or digest of another kernel or model; `chosen` is the signal of the digest.
import { html } from 'htm/preact';
import { useState } from 'preact/hooks';
import { findDigest } from './address.js';

export function DigestForm({ chosen, noun }) {
  const [fault, setFault] = useState('');
  const choose = (event) => {
    event.preventDefault();
    const text = new FormData(event.currentTarget).get('other').trim(), found = findDigest(text);
    setFault(text && !found ? `expected the link of a compiled ${noun}, or sha256: and 64 hexadecimal digits, got ${text.slice(0, 100)}` : '');
    chosen.value = found ?? '';
  };
  return html`<form class="choices" onSubmit=${choose}><label>with the link or digest of another ${noun} <input name="other" data-testid="compare" defaultValue=${chosen.value} autocomplete="off" /></label><button>compare</button></form>
    ${fault && html`<p class="bad" role="alert" data-testid="fault">${fault}</p>`}`;
}
