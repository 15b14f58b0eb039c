// The inputs that a text reads, with types and shapes for those that have none yet. The service checks the text itself.
const DEFAULT_EXTENT = 1024;
const WINDOW_EXTENT = 64; // of a dimension with a computed index
const WORDS = new Set(['true', 'false', 'none']);

// Without comments and strings, each statement on one line.
const clean = (text) =>
  text.replace(/"[^"]*"|'[^']*'|`[^`]*`/g, '""').replace(/#.*$/gm, '').replace(/\n\s*(?=[^\sA-Za-z_]|where\b)/g, ' ');

// Cut a text where one of the characters stands outside of brackets.
function split(text, characters) {
  const parts = [''];
  let depth = 0;
  for (const each of text) {
    if ('[({'.includes(each)) depth++;
    if ('])}'.includes(each)) depth = Math.max(0, depth - 1);
    if (depth === 0 && characters.includes(each)) parts.push('');
    else parts[parts.length - 1] += each;
  }
  return parts;
}

function bracketed(text, start) {
  let depth = 0;
  for (let i = start; i < text.length; i++) {
    if (text[i] === '[') depth++;
    if (text[i] === ']' && --depth === 0) return text.slice(start + 1, i);
  }
  return null;
}

// Yield [name, indices] for each tensor that the right side of a statement reads; indices are null for a bare name.
function* reads(right, isCall) {
  for (const { 0: token, index } of right.matchAll(/\d[\w.]*|\.\s*\w+|[A-Za-z_]\w*/g)) {
    const rest = right.slice(index + token.length);
    if (!/^[A-Za-z_]/.test(token) || /^\s*\(/.test(rest)) continue; // a number, a method, a function
    if (/^\s*\[/.test(rest)) {
      const indices = bracketed(right, right.indexOf('[', index));
      yield [token, indices && split(indices, ',').map((each) => each.trim()).filter(Boolean)]; // null while it is typed
    } else if (isCall && !/^\s*=/.test(rest) && !WORDS.has(token)) yield [token, null];
  }
}

const isPlain = (index) => /^[A-Za-z_]\w*$/.test(index);
const ASSIGNMENT = /^\s*([A-Za-z_][\w\s,]*?)\s*(\[[^\]=]*\])?\s*(?::[\w\s]*)?(?:[+*<>&|])?=[!.]?([^]*)$/;

// `known(name, rank)`: the last type of an input, with that rank unless it is undefined. `dtype`: of the first input.
export function inferInputs(text, known, dtype) {
  const written = new Set(), found = [], extents = {};
  const cleaned = clean(text);
  for (const statement of split(cleaned, ';\n')) {
    const parts = ASSIGNMENT.exec(statement.split(/\bwhere\b(?!\s*\()/)[0]);
    if (!parts) continue;
    for (const [name, indices] of reads(parts[3], !parts[2])) if (!written.has(name)) found.push([name, indices]);
    for (const name of parts[1].split(',')) written.add(name.trim());
  }
  for (const [, axis, extent] of cleaned.matchAll(/\b([A-Za-z_]\w*)\s+in\s+(\d+)/g)) extents[axis] ??= Number(extent);
  let type = dtype;
  for (const [name, indices] of found) {
    const last = known(name, indices?.length);
    type = last?.dtype ?? type;
    if (last) indices?.forEach((axis, i) => isPlain(axis) && (extents[axis] ??= last.shape[i]));
  }
  const isIndex = (name) => found.some(([, indices]) => indices?.some((index) => new RegExp(`\\b${name}\\s*\\[`).test(index)));
  const inputs = {};
  for (const [name, indices] of found) {
    const shape = indices?.map((index) => extents[index] ?? (isPlain(index) ? DEFAULT_EXTENT : WINDOW_EXTENT));
    const inferred = { dtype: isIndex(name) ? 'int32' : type, shape: shape ?? [DEFAULT_EXTENT, DEFAULT_EXTENT] };
    inputs[name] ??= known(name, indices?.length) ?? inferred;
  }
  return inputs;
}
