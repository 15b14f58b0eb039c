// An answer that is not 2xx: `problem` is the service's (RFC 9457).
export class ProblemError extends Error {
  constructor(problem) {
    super(problem.detail);
    this.problem = problem;
  }
}

// A proxy may answer in place of the service, with any text.
export function readProblem({ status, statusText }, text) {
  let given = null;
  try {
    given = JSON.parse(text);
  } catch {
    // not the service's
  }
  const { detail, code, errors } = given ?? {};
  const isProblem = typeof detail === 'string' && typeof code === 'string';
  return isProblem ? { ...given, status, errors: Array.isArray(errors) ? errors : [] } : { status, detail: `${status} ${statusText}`, code: 'no-answer', errors: [] };
}

const FAULTS = [400, 404, 413, 422];
// Whether the request is wrong, rather than the service busy or away.
export const isRefusal = (problem) => FAULTS.includes(problem?.status);

export const problemOf = (error) => (error instanceof ProblemError ? error.problem : { detail: error.message, code: 'no-answer', errors: [] });
