// Kernels of a program. Some read constants alone: they run once, before all calls, and are part of none.
export const callsOf = ({ kernels }) => kernels.filter((kernel) => !kernel.runs_once);
export const onceOf = ({ kernels }) => kernels.filter((kernel) => kernel.runs_once);
export const longest = (program) => callsOf(program).reduce((a, b) => (b.seconds > a.seconds ? b : a));
export const operationsOf = (program) => callsOf(program).reduce((total, kernel) => total + kernel.operations.executed, 0);
