// Short names of nodes. A slash separates the parts of a path where it follows a name, a closing bracket or another slash.
const SEPARATOR = /(?<=^|[\p{L}\p{N}_)\]}/])\//u;

// The last part of a path without its number, unless nothing is left.
function word(member) {
  const last = member.split(SEPARATOR).filter(Boolean).at(-1) ?? member;
  return last.replace(/[._]?\d+$/, '') || last;
}

export function labelOf({ members }) {
  const kinds = [...new Set(members.map(word))];
  if (kinds.length > 2) return `${kinds.slice(0, 2).join(' ')}… ${members.length} ops`;
  return kinds.join(' + ') + (members.length > kinds.length ? ` ×${members.length}` : '');
}
