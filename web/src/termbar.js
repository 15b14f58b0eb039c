// The bar of terms. What overlaps is not stacked: the longest is the bar, the others are marks where they would end.
import { html } from 'htm/preact';
import { colour } from './colours.js';
import * as f from './format.js';

export const Hatch = () => html`<svg width="0" height="0" aria-hidden="true" class="unseen"><defs>
  <pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="5" height="5" style="fill:var(--paper-2)" /><rect width="2.4" height="5" style="fill:var(--exposed)" />
  </pattern></defs></svg>`;

// The seconds of a term that count.
export const secondsOf = ({ seconds, fraction = 1 }) => fraction * seconds;
const byLength = (a, b) => secondsOf(b) - secondsOf(a);
const total = (terms) => terms.reduce((seconds, term) => seconds + secondsOf(term), 0);
const those = (kernel, combines) => kernel.terms.filter((term) => term.combines === combines && secondsOf(term) > 0).sort(byLength);

// What runs side by side, the longest first: terms that overlap, and the sum of those that sum.
export function besides(kernel) {
  const summed = those(kernel, 'sums'), alone = those(kernel, 'overlaps').map((term) => [term]);
  return [...alone, ...(summed.length ? [summed] : [])]
    .map((terms) => ({ terms, name: terms.map((term) => term.name).join(' + '), seconds: total(terms) }))
    .sort((a, b) => b.seconds - a.seconds);
}
export const adding = (kernel) => [...those(kernel, 'adds'), ...those(kernel, 'after')];

// Where each part of the bar begins and each mark stands, in seconds.
function arrange(kernels) {
  const parts = [], marks = [];
  let end = 0;
  const add = (name, seconds) => {
    parts.push({ name, seconds, start: end });
    end += seconds;
  };
  for (const kernel of kernels) {
    const start = end, [longest, ...others] = besides(kernel);
    for (const term of longest?.terms ?? []) add(term.name, secondsOf(term));
    for (const other of others) marks.push({ name: other.terms[0].name, label: other.name, seconds: other.seconds, at: start + other.seconds });
    for (const term of those(kernel, 'adds')) add(term.name, secondsOf(term));
    const [floor] = those(kernel, 'floor');
    if (floor && secondsOf(floor) > end - start) add(floor.name, secondsOf(floor) - (end - start));
    for (const term of those(kernel, 'after')) add(term.name, secondsOf(term));
  }
  return { parts, marks };
}

export function TermBar({ kernels, device, longest, height = 14 }) {
  const { parts, marks } = arrange(kernels);
  const x = (seconds) => `${(100 * seconds) / longest}%`;
  const fill = (name) => (name === 'exposed' ? 'url(#hatch)' : colour(device, name));
  const label = parts.map((part) => `${part.name} ${f.time(part.seconds)}`).join(', then ');
  return html`<svg class="terms" width="100%" height=${height} role="img" aria-label=${label}>
    ${parts.map((part) => html`<rect x=${x(part.start)} width=${x(part.seconds)} height=${height} style=${`fill:${fill(part.name)}`}>
      <title>${part.name}: ${f.time(part.seconds)}</title></rect>`)}
    ${parts.slice(1).map((part) => html`<line x1=${x(part.start)} x2=${x(part.start)} y2=${height} class="cut" />`)}
    ${marks.map((mark) => html`<line x1=${x(mark.at)} x2=${x(mark.at)} y1="2" y2=${height} class="under" />
      <line x1=${x(mark.at)} x2=${x(mark.at)} y1="2" y2=${height} style=${`stroke:${fill(mark.name)};stroke-width:2`}>
        <title>${mark.label} would be done after ${f.time(mark.seconds)}</title></line>`)}
  </svg>`;
}

export function Legend({ kernels, device }) {
  const seconds = new Map();
  for (const term of kernels.flatMap((kernel) => kernel.terms)) seconds.set(term.name, (seconds.get(term.name) ?? 0) + secondsOf(term));
  return html`<ul class="legend">${[...seconds].map(([name, total]) => html`<li>
    <i class=${name === 'exposed' ? 'dot hatched' : 'dot'} style=${`--c:${colour(device, name)}`}></i>${name}<em>${f.time(total)}</em></li>`)}</ul>`;
}
