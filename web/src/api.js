// Requests to the service that sent this page. The API key stays in this tab and goes into a header only.
import { signal } from '@preact/signals';
import { ProblemError, readProblem } from './problem.js';

const KEY = 'roller-key';
export const needsKey = signal(false);

export const readKey = () => sessionStorage.getItem(KEY) ?? '';
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
  needsKey.value = false;
}

async function request(path, options = {}) {
  const key = readKey();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  needsKey.value ||= answer.status === 401;
  throw new ProblemError(readProblem(answer, await answer.text()));
}

export const getJson = async (path, options) => (await request(path, options)).json();
export const getText = async (path) => (await request(path)).text();
export const put = async (path, body) => (await request(path, { method: 'PUT', body, headers: { 'Content-Type': 'application/octet-stream' } })).json();

// Reads server-sent events until they end. EventSource sends no key, so that this reads them by itself.
export async function stream(path, last, take) {
  const { body } = await request(path, last ? { headers: { 'Last-Event-ID': last } } : {});
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (text + value).split('\n\n');
    text = blocks.pop();
    for (const block of blocks) {
      const lines = block.split('\n').map((line) => /^(\w+): ?(.*)$/.exec(line)).filter(Boolean);
      take(Object.fromEntries(lines.map(([, name, content]) => [name, content])));
    }
  }
}
export const getBlob = async (path) => (await request(path)).blob();
export const post = (path, body, { signal: aborted, headers } = {}) =>
  getJson(path, {
    method: 'POST',
    body: JSON.stringify(body),
    headers: { 'Content-Type': 'application/json', ...headers },
    signal: aborted,
  });
