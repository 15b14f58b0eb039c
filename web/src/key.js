import { html } from 'htm/preact';
import { needsKey, setKey } from './api.js';

const SENDABLE = '[\\x21-\\x7e]+'; // in a header

// Asks for the API key of a service that needs one. It is kept in this tab only.
export function Key({ load }) {
  if (!needsKey.value) return null;
  const send = (event) => {
    event.preventDefault();
    setKey(new FormData(event.currentTarget).get('key'));
    load();
  };
  return html`<form class="key" onSubmit=${send}>
    <label>This service needs an API key <input name="key" type="password" autocomplete="off" required pattern=${SENDABLE} title="letters, digits and signs of ASCII, without spaces" autofocus /></label>
    <button>use it in this tab</button>
  </form>`;
}
