// Requests to the service that sent this page. The API key stays in this tab and goes into a header only.
import { signal } from '@preact/signals';

const KEY = 'roller-key';
export const needsKey = signal(false);

export const readKey = () => sessionStorage.getItem(KEY) ?? '';
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
  needsKey.value = false;
}

// An answer that is not 2xx: `problem` is the service's (RFC 9457).
export class ProblemError extends Error {
  constructor(problem) {
    super(problem.detail);
    this.problem = problem;
  }
}

export const problemOf = (error) => (error instanceof ProblemError ? error.problem : { detail: error.message, code: 'no-answer', errors: [] });

async function request(path, options = {}) {
  const key = readKey();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  needsKey.value ||= answer.status === 401;
  const isProblem = answer.headers.get('content-type')?.includes('json');
  const problem = isProblem ? await answer.json() : { detail: `${answer.status} ${answer.statusText}`, code: 'no-answer', errors: [] };
  throw new ProblemError(problem);
}

export const getJson = async (path, options) => (await request(path, options)).json();
export const getText = async (path) => (await request(path)).text();
export const getBlob = async (path) => (await request(path)).blob();
export const post = (path, body, { signal: aborted, headers } = {}) =>
  getJson(path, {
    method: 'POST',
    body: JSON.stringify(body),
    headers: { 'Content-Type': 'application/json', ...headers },
    signal: aborted,
  });
