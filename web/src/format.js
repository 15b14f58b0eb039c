// Numbers as a kernel engineer reads them: three digits and a unit.
const fixed = (x) => (x === 0 ? '0' : Math.abs(x) >= 99.95 ? x.toFixed(0) : Math.abs(x) >= 9.995 ? x.toFixed(1) : x.toFixed(2));

const TIMES = [[1, 's'], [1e-3, 'ms'], [1e-6, 'µs'], [1e-9, 'ns']];
export function time(seconds) {
  if (seconds == null) return '–';
  const [scale, unit] = TIMES.find(([size]) => seconds >= size * 0.9995) ?? TIMES[3];
  return `${fixed(seconds / scale)} ${unit}`;
}

function scaled(x, unit, base, prefixes) {
  let power = 0;
  while (x >= base * 0.9995 && power < prefixes.length - 1) {
    x /= base;
    power++;
  }
  return `${Number.isInteger(x) ? x : fixed(x)} ${prefixes[power]}${unit}`;
}
const BINARY = ['', 'Ki', 'Mi', 'Gi', 'Ti'];
const DECIMAL = ['', 'k', 'M', 'G', 'T', 'P'];

export const bytes = (count) => scaled(count, 'B', 1024, BINARY);
const SHORT = { operations: 'op' };
export const amount = (count, unit) => (unit === 'B' ? bytes(count) : scaled(count, SHORT[unit] ?? unit, 1000, DECIMAL));
export const rate = (perSecond, unit) => `${scaled(perSecond, SHORT[unit] ?? unit, 1000, DECIMAL)}/s`;
export const count = (number) => (number >= 1e6 ? scaled(number, '', 1000, DECIMAL).trim() : number.toLocaleString('en'));
export const percent = (share) => (share >= 0.0995 || share === 0 ? `${Math.round(share * 100)} %` : `${(share * 100).toFixed(1)} %`);
export const times = (factor) => `${fixed(factor)}×`;
export const short = fixed;

export const tile = (axes, extents) =>
  axes.map((axis, i) => [axis, extents[i]]).filter(([, extent]) => extent > 1).map((pair) => pair.join(' ')).join(' · ') || '1 element';
export const decades = (low, high) => {
  const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => 10 ** (first + i));
};
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? '' : 's'}`;
export const dims = (extents) => Object.entries(extents).map((pair) => pair.join(' = ')).join(', ');
export const device = (id) => id.replace(/^(nvidia|amd)-/, '');
