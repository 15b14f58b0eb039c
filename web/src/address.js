// What an address says of a request. It may have been written by hand: what is not well formed is left out.
const inputText = ([name, type]) => `${name}=${type.dtype}[${type.shape.join(',')}]`; // as `roller explain --input`
function readInput(value) {
  const [, name, dtype, shape] = /^(\w+)=(\w+)\[([\d,]*)\]$/.exec(value) ?? [];
  return name && [name, { dtype, shape: shape ? shape.split(',').map(Number) : [] }];
}
function readOptions(value) {
  try {
    return Object.assign({}, JSON.parse(value));
  } catch {
    return {};
  }
}
function readFactor(value) {
  const end = value.lastIndexOf('='), factor = Number(value.slice(end + 1));
  return factor > 0 && Number.isFinite(factor) && [value.slice(0, end), factor];
}

const readNumber = (value) => (/^\d{1,9}$/.test(value ?? '') ? Number(value) : null);

// What is looked at: numbers, null where the address has none.
export const readSelection = (query) => ({
  program: readNumber(query.get('program')),
  search: readNumber(query.get('search')),
  step: readNumber(query.get('step')),
  line: readNumber(query.get('line')),
});

// What is looked at of a model, as readSelection says it.
export const readChoice = (query) => ({ bucket: readNumber(query.get('bucket')), node: readNumber(query.get('node')) });

// The digest of an address of a kernel, as it is written if it is not well formed; null of another address.
export function readDigest(path) {
  const written = /^\/[km]\/(.+)$/.exec(path)?.[1] ?? null;
  try {
    return written && decodeURIComponent(written);
  } catch {
    return written;
  }
}

// The digest of a kernel in a text that somebody pastes: a digest, or a link as it is written or encoded; else null.
export function findDigest(text) {
  let decoded = text;
  try {
    decoded = decodeURIComponent(text);
  } catch {
    // no encoded link
  }
  return /\bsha256:[0-9a-f]{64}(?![0-9a-z])/i.exec(decoded)?.[0].toLowerCase() ?? null;
}

export function requestQuery({ expression, target, inputs, constants, factors, outputs, options }) {
  const query = new URLSearchParams({ expr: expression, target });
  for (const each of Object.entries(inputs)) query.append('input', inputText(each));
  for (const name of constants) query.append('constant', name);
  for (const [name, factor] of Object.entries(factors)) query.append('scale', `${name}=${factor}`);
  for (const name of outputs ?? []) query.append('output', name);
  if (Object.keys(options).length) query.append('options', JSON.stringify(options));
  return query;
}

export const readRequest = (query) => ({
  expression: query.get('expr'),
  target: query.get('target'),
  types: Object.fromEntries(query.getAll('input').map(readInput).filter(Boolean)),
  constants: query.getAll('constant'),
  factors: Object.fromEntries(query.getAll('scale').map(readFactor).filter(Boolean)),
  outputs: query.has('output') ? query.getAll('output') : null,
  options: readOptions(query.get('options')),
});
