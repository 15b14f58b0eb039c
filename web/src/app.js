import { render } from 'preact';
import { useState } from 'preact/hooks';
import { html } from 'htm/preact';
import { Construction } from './construction.js';
import { Desk } from './desk.js';
import { Key } from './key.js';
import { Programs } from './programs.js';
import { address, isFault, kernel, load, problem, remark, story, theme, waiting } from './state.js';
import { Hatch } from './termbar.js';
import { Text } from './text.js';
import { Verdict } from './verdict.js';

const Mark = () => html`<svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">
  <rect width="18" height="18" rx="2" style="fill:var(--outer)" />
  <rect width="12" height="12" style="fill:var(--block)" />
  <rect width="6" height="6" style="fill:var(--thread)" />
</svg>`;

const PAGES = [['Kernel', '/'], ['Model', '/m'], ['Farm', '/farm']];
const current = /^\/m(\/|$)/.test(location.pathname) ? '/m' : location.pathname === '/farm' ? '/farm' : '/';

function Top({ address }) {
  const [copied, setCopied] = useState(false);
  const copy = async (event) => {
    if (!navigator.clipboard) return; // neither https nor localhost: the link is followed
    event.preventDefault();
    await navigator.clipboard.writeText(new URL(address.value, location.href).href);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  const other = theme.value === 'dark' ? 'light' : 'dark';
  return html`<header class="top">
    <a class="brand" href="/"><${Mark} /><b>roller</b></a>
    <nav aria-label="pages">${PAGES.map(([name, path]) => html`<a href=${path} aria-current=${path === current ? 'page' : null}>${name}</a>`)}</nav>
    <a class="link" data-testid="permalink" href=${address.value} onClick=${copy}>${copied ? 'copied' : 'copy link'}</a>
    <button class="theme" onClick=${() => (theme.value = other)}>${other}</button>
  </header>`;
}

function Work() {
  const said = remark.value && html`<p class="note" data-testid="remark">${remark.value}</p>`;
  if (!story.value && kernel.value) return html`${said}<${Text} />`;
  if (!story.value) return html`<p class="waiting" role="status">${problem.value ? '' : 'Constructing tiles…'}</p>`;
  return html`${problem.value && !remark.value && html`<p class="note">Below is the last program ${isFault.value ? 'without errors' : 'that was explained'}.</p>`}${said}<${Verdict} /><${Construction} /><${Programs} /><${Text} />`;
}

const KernelPage = () => html`<main class="kernel"><h1 class="unseen">Why this tile</h1><${Desk} /><div class=${['work', problem.value && 'old', waiting.value && 'waits'].filter(Boolean).join(' ')} aria-busy=${waiting.value}><${Work} /></div></main>`;

// Pages of models and of the farm are loaded where they are asked for.
const page = current === '/m' ? await import('./modelpage.js') : current === '/farm' ? await import('./farm.js') : { Page: KernelPage, address, load };
document.title = { '/': 'roller: see why this tile', '/m': 'roller: a model', '/farm': 'roller: the build farm' }[current];

const App = () => html`<${Hatch} /><${Top} address=${page.address} /><${Key} load=${page.load} /><${page.Page} />`;

page.load();
render(html`<${App} />`, document.getElementById('app'));
