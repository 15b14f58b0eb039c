// Which lines of two texts belong together, and which parts and numbers a line has. Pure functions.

// The link of a line of the listing; null if it comes from no line of the source. Links are in the order of lines.
export function linkOf(links, line) {
  let low = 0, high = links.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (links[middle].last < line) low = middle + 1;
    else if (links[middle].first > line) high = middle - 1;
    else return links[middle];
  }
  return null;
}

// The lines of the listing that come from a line of the source.
export const linesOf = (links, source) =>
  links.filter((each) => each.source.includes(source)).flatMap(({ first, last }) => Array.from({ length: last - first + 1 }, (_, i) => first + i));

// The innermost part that a line is in.
export const partOf = (parts, line) => parts.filter(({ first, last }) => first <= line && line <= last).reduce((inner, each) => (!inner || each.last - each.first <= inner.last - inner.first ? each : inner), null);

// A line as texts, and numbers that know where they come from.
export function segments(text, numbers) {
  const parts = [];
  let at = 0;
  numbers.forEach((number, index) => {
    parts.push(text.slice(at, number.column), { number, index, text: text.slice(number.column, number.column + number.length) });
    at = number.column + number.length;
  });
  return [...parts, text.slice(at)];
}

// Lines as text: runs of adjacent ones.
export function ranges(lines) {
  const runs = [];
  for (const line of lines) {
    if (runs.length && runs.at(-1)[1] === line - 1) runs.at(-1)[1] = line;
    else runs.push([line, line]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
}

// The values of the names in a number's formula, of a program with one kernel.
export function namesOf(number, program) {
  if (program?.kernels.length !== 1) return '';
  const [{ program: tiles, axes }] = program.kernels;
  const valueOf = (name) => {
    const [level, axis] = name.split('.');
    return axis === undefined ? tiles[name] ?? axes.find((each) => each.name === name)?.extent : tiles.tiles[level]?.[axis];
  };
  return number.sources.map((name) => [name, valueOf(name)]).filter(([, value]) => typeof value === 'number').map((pair) => pair.join(' = ')).join(', ');
}
