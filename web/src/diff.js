// The lines that two texts share, and those that only one has (Myers, "An O(ND) difference algorithm", 1986).
const MOST = 800; // lines that differ; beyond it the rest is shown as removed and added

// Returns [kind, line] in order: ' ' in both, '-' in the first text alone, '+' in the second alone.
export function diffLines(before, after) {
  const a = before.split('\n'), b = after.split('\n');
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end++;
  const same = (lines) => lines.map((line) => [' ', line]);
  return [...same(a.slice(0, start)), ...diffMiddle(a.slice(start, a.length - end), b.slice(start, b.length - end)), ...same(a.slice(a.length - end))];
}

function diffMiddle(a, b) {
  const trace = walk(a, b), edits = [];
  if (!trace) return [...a.map((line) => ['-', line]), ...b.map((line) => ['+', line])];
  let x = a.length, y = b.length;
  for (let d = trace.length - 1; d > 0; d--) {
    const k = x - y, adds = addsOne(trace[d - 1], k, d), from = adds ? k + 1 : k - 1, x0 = trace[d - 1].get(from), y0 = x0 - from;
    while (x > (adds ? x0 : x0 + 1)) edits.push([' ', a[--x]]);
    edits.push(adds ? ['+', b[y0]] : ['-', a[x0]]);
    [x, y] = [x0, y0];
  }
  while (x > 0) edits.push([' ', a[--x]]);
  return edits.reverse();
}

// Whether the furthest path with d edits comes to a diagonal by a line of the second text, and not of the first.
const addsOne = (reached, k, d) => k === -d || (k !== d && (reached.get(k - 1) ?? -1) < (reached.get(k + 1) ?? -1));

// The furthest x on each diagonal after d edits, for each d up to the number of edits; null if there are too many.
function walk(a, b) {
  const trace = [];
  let reached = new Map([[1, 0]]);
  for (let d = 0; d <= Math.min(MOST, a.length + b.length); d++) {
    const next = new Map();
    for (let k = -d; k <= d; k += 2) {
      let x = addsOne(reached, k, d) ? reached.get(k + 1) : reached.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      next.set(k, x);
      if (x >= a.length && x - k >= b.length) return [...trace, next];
    }
    trace.push(next);
    reached = next;
  }
  return null;
}
