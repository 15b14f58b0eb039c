// The page as one file: its story is in the file, and nothing is asked of a service.
import { render } from 'preact';
import { html } from 'htm/preact';
import { Construction } from './construction.js';
import { ModelView } from './model.js';
import { hasService, show } from './modelstate.js';
import { Programs } from './programs.js';
import { choose, story, theme } from './state.js';
import { Hatch } from './termbar.js';
import { Verdict } from './verdict.js';

const { kind, data } = JSON.parse(document.getElementById('data').textContent);
hasService.value = false;

function Source() {
  if (!data.source) return null;
  return html`<section class="panel" aria-labelledby="text-title"><header><h2 id="text-title">Kernel</h2></header>
    <div class="listing" data-testid="source" tabindex="0" role="group" aria-label="source"><pre>${data.source.split('\n').map((line, i) => html`<span class="line"><i class="at">${i + 1}</i>${line}${'\n'}</span>`)}</pre></div></section>`;
}

const KernelView = () => html`<section class="panel"><pre data-testid="expression">${story.value.expression}</pre><p class="quiet">${story.value.device.name}</p></section><${Verdict} /><${Construction} /><${Programs} /><${Source} />`;

function Top() {
  const other = theme.value === 'dark' ? 'light' : 'dark';
  return html`<header class="top"><b class="brand">roller</b><span class="quiet tagline">a file without a service</span><button class="theme" onClick=${() => (theme.value = other)}>${other}</button></header>`;
}

if (kind === 'model') show(data);
else {
  story.value = data.story;
  choose(0);
}
const View = kind === 'model' ? ModelView : KernelView;
render(html`<${Hatch} /><${Top} /><main class="work"><h1 class="unseen">${kind === 'model' ? 'When each core does what' : 'Why this tile'}</h1><${View} /></main>`, document.getElementById('app'));
