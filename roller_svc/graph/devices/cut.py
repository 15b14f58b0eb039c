"""Cut a graph into the fewest parts of one device, so that no part waits for a part that waits for it.

Parts run one after the other in some order, so a cut is a list of devices: on each in turn, all nodes run whose
predecessors have run. Running more nodes never makes a later part impossible. So it suffices to search over the sets of
nodes that have run, where each part takes all that it can. Functions of Python run between parts as soon as they can,
since each is a call of its own in every cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roller_svc.errors import InvariantError

MAX_SETS = 4096  # of nodes that have run, kept for each number of parts: with fewer, the cut is the smallest one


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes that run on one device, in program order."""

    device: str
    nodes: tuple[str, ...]


def cut(nodes: Sequence[str], devices: Mapping[str, str], before: Mapping[str, Sequence[str]], hosts: Sequence[str]) -> list[Part]:
    """Return the parts in an order in which they can run.

    Args:
        nodes: names in program order.
        devices: the device of each node.
        before: the nodes that have to run before each node.
        hosts: nodes that are parts of their own.
    """
    number = {name: i for i, name in enumerate(nodes)}
    needed = [sum({1 << number[each] for each in before.get(name, ())}) for name in nodes]
    if any(mask >> i for i, mask in enumerate(needed)):
        raise InvariantError("a node depends on one that comes after it")
    alone = [name in set(hosts) for name in nodes]
    of_device = {
        device: [i for i, name in enumerate(nodes) if devices[name] == device and not alone[i]]
        for device in sorted({devices[name] for i, name in enumerate(nodes) if not alone[i]})
    }
    own = [i for i in range(len(nodes)) if alone[i]]

    def run(done: int, listed: Sequence[int]) -> int:
        """Return the nodes that have run after all of the listed that can. They are in program order, so once suffices."""
        for i in listed:
            if not done >> i & 1 and needed[i] & ~done == 0:
                done |= 1 << i
        return done

    everything = (1 << len(nodes)) - 1
    start = run(0, own)
    reached: dict[int, tuple[int, str] | None] = {start: None}  # by the nodes that have run: those before, and the device
    front = [start]
    while everything not in reached:
        following: dict[int, None] = {}
        for done in front:
            for device, listed in of_device.items():
                after = run(run(done, listed), own)
                if after != done and after not in reached:
                    reached[after] = done, device
                    following[after] = None
        front = sorted(following, key=lambda done: -done.bit_count())[:MAX_SETS]
        if not front:
            raise InvariantError("the nodes depend on each other")
    steps: list[tuple[int, str]] = []
    at = everything
    while (step := reached[at]) is not None:
        steps.append(step)
        at = step[0]
    parts = [Part(devices[nodes[i]], (nodes[i],)) for i in own if start >> i & 1]
    for done, device in reversed(steps):
        after = run(done, of_device[device])
        parts.append(Part(device, tuple(nodes[i] for i in of_device[device] if (after & ~done) >> i & 1)))
        last = run(after, own)
        parts += [Part(devices[nodes[i]], (nodes[i],)) for i in own if (last & ~after) >> i & 1]
    return parts


def check_cut(
    parts: Sequence[Part],
    nodes: Sequence[str],
    devices: Mapping[str, str],
    before: Mapping[str, Sequence[str]],
    hosts: Sequence[str],
) -> None:
    """Raise InvariantError unless parts run all nodes once, on their devices, after all that these need.

    The arguments are those of `cut`. A part runs its nodes in the order that it has.
    """
    done: set[str] = set()
    for part in parts:
        if len(part.nodes) != 1 and not set(hosts).isdisjoint(part.nodes):
            raise InvariantError(f"{', '.join(part.nodes)} are one part, and one of them is a function of Python")
        for name in part.nodes:
            if devices.get(name) != part.device:
                raise InvariantError(f"node {name} runs on {part.device}, its device is {devices.get(name)}")
            if name in done:
                raise InvariantError(f"node {name} runs twice")
            if missing := [each for each in before.get(name, ()) if each not in done]:
                raise InvariantError(f"node {name} runs before {missing[0]}")
            done.add(name)
    if missing := [name for name in nodes if name not in done]:
        raise InvariantError(f"node {missing[0]} is in no part")
