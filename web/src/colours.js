// One colour for one memory level everywhere: by what the level is to the tile, not by its name.
export const COMPUTE = ['mma', 'fma', 'wgmma', 'mfma', 'compute'];
const SPECIAL = ['exponentials', 'transform', 'update', 'packing'];
const OTHERS = { launch: 'var(--launch)', exposed: 'var(--exposed)' };

export function colour(device, name) {
  const levels = device.levels.map((level) => level.name);
  const [block, thread] = device.tile_levels;
  if (name === thread) return 'var(--thread)';
  if (name === block) return 'var(--block)';
  if (name === levels[0]) return 'var(--outer)';
  if (levels.includes(name)) return levels.indexOf(name) < levels.indexOf(block) ? 'var(--between)' : 'var(--inner)';
  if (COMPUTE.includes(name) || name === 'arithmetic') return 'var(--compute)';
  if (SPECIAL.includes(name)) return 'var(--special)';
  return OTHERS[name] ?? 'var(--other)';
}

// The same colour as text: dark or light enough to read.
export const tone = (device, name) => `color-mix(in oklab, ${colour(device, name)} 70%, var(--ink))`;
