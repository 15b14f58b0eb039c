import * as f from './format.js';

// Kernels of a program. Some read constants alone: they run once, before all calls, and are part of none.
export const callsOf = ({ kernels }) => kernels.filter((kernel) => !kernel.runs_once);
export const onceOf = ({ kernels }) => kernels.filter((kernel) => kernel.runs_once);
export const longest = (program) => callsOf(program).reduce((a, b) => (b.seconds > a.seconds ? b : a));
export const operationsOf = (program) => callsOf(program).reduce((total, kernel) => total + kernel.operations.executed, 0);

// Name and value of what the launches of a compiled kernel have, in their order.
export function launchFigures({ launches, resources }) {
  const of = (i) => (i ? ` of launch ${i + 1}` : '');
  return [
    ['launches', f.count(launches.length)],
    ...launches.flatMap(({ grid, block }, i) => [[`grid${of(i)}`, grid.join('×')], [`block${of(i)}`, block.join('×')]]),
    ...resources.flatMap((each, i) => [[`registers${of(i)}`, f.count(each.registers_per_thread)], [`shared${of(i)}`, f.bytes(each.shared_bytes)], [`spilled${of(i)}`, f.bytes(each.spill_bytes)]]),
  ];
}
