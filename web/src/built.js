// How a stored kernel was built, from its report: the request, and its program among those of a story.

// The body of kernels:compile that built the kernel; null of one that a version before has stored.
export const requestOf = (report) => report?.extra?.request ?? null;

// The story of the build, its programs in the order of their measured times; null of a schedule by hand.
export function storyOf(report, facts) {
  const { story, attempts } = report?.extra?.report ?? {};
  const number = attempts?.findIndex(({ estimate }) => estimate.seconds === facts.estimate?.seconds && estimate.bound === facts.estimate.bound) ?? -1;
  return number < 0 ? null : { story, number };
}

// The measured seconds of the programs that a build has timed, by their texts.
export function measuredOf(report) {
  const { story, attempts } = report?.extra?.report ?? {};
  const timed = (attempts ?? []).flatMap(({ measurement }, i) => (measurement && story.programs[i] ? [[programText(story.programs[i]), measurement.median_s]] : []));
  return Object.fromEntries(timed);
}

export const programText = (program) => JSON.stringify(program.kernels.map((kernel) => [kernel.group, kernel.program]));

// The number in a story of the program that another story has; -1 if it has none like it.
export const findProgram = (story, program) => story.programs.findIndex((each) => programText(each) === programText(program));
