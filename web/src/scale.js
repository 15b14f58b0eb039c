// A device's spec with other rates and capacities: what would another device do?
export const STEP = 0.5; // octaves of a slider
const RATES = ['bandwidth_bytes_per_s', 'peak_bandwidth_bytes_per_s'];
const ARITHMETIC = ['flops_per_s', 'peak_flops_per_s', 'quotients_per_s'];
const CAPACITIES = ['shared_bytes_per_block', 'shared_bytes_per_core'];

const times = (values, names, factor) =>
  ({ ...values, ...Object.fromEntries(names.filter((name) => values[name] != null).map((name) => [name, values[name] * factor])) });
const ofLevel = (name, change) => (spec, factor) =>
  ({ ...spec, levels: spec.levels.map((level) => (level.name === name ? change(level, factor) : level)) });
const whole = (values, names) => ({ ...values, ...Object.fromEntries(names.map((name) => [name, Math.round(values[name])])) });

// What the system takes of a block does not scale: a block has no more than what is left of its core.
const sharing = (limits) => ({
  ...limits,
  shared_bytes_per_block: Math.min(limits.shared_bytes_per_block, limits.shared_bytes_per_core - (limits.shared_bytes_reserved_per_block ?? 0)),
});

// What can be scaled: by name, a function of the spec and a factor.
export function resourcesOf({ levels, tile_levels: [block, thread] }) {
  const memory = levels.filter((level) => level.name !== thread);
  return {
    ...Object.fromEntries(memory.map(({ name }) => [`${name} bandwidth`, ofLevel(name, (level, factor) => times(level, RATES, factor))])),
    [`${block} capacity`]: (spec, factor) => ({
      ...ofLevel(block, (level) => whole(times(level, ['capacity_bytes'], factor), ['capacity_bytes']))(spec),
      limits: sharing(whole(times(spec.limits, CAPACITIES, factor), CAPACITIES)),
    }),
    // Registers that feed faster units are faster themselves.
    'arithmetic rate': (spec, factor) => ({
      ...ofLevel(thread, (level) => times(level, RATES, Math.max(1, factor)))(spec),
      units: spec.units.map((unit) => times(unit, ARITHMETIC, factor)),
    }),
    'launch overhead': (spec, factor) => ({ ...spec, limits: times(spec.limits, ['launch_overhead_s'], factor) }),
  };
}

export function scaled(spec, factors) {
  const resources = resourcesOf(spec);
  return Object.entries(factors).reduce((changed, [name, factor]) => (Object.hasOwn(resources, name) ? resources[name](changed, factor) : changed), spec);
}

// The factors from the one asked for to 1, by steps of half an octave: the last that a spec allows is taken.
export function fallbacks(factor) {
  const octaves = Math.log2(factor), steps = Math.ceil(Math.abs(octaves) / STEP);
  return Array.from({ length: steps + 1 }, (_, i) => (i === steps ? 1 : 2 ** (octaves - Math.sign(octaves) * STEP * i)));
}
