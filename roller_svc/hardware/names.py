"""Names of devices as people say them → ids: `H200`, `rtx 4090`, `sm_90a`, `cuda`, `all`, and lists of these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache

from roller_svc.ir.hardware import Arch, HardwareSpec, TargetKind, arch_named

ALL = "all"
MAX_SUGGESTIONS = 3
_SEPARATORS = re.compile(r"[\s_/-]+")
# Other words for the devices of a kind.
_KINDS = {
    "gpu": (TargetKind.CUDA, TargetKind.AMD),
    "cuda": (TargetKind.CUDA,),
    "rocm": (TargetKind.AMD,),
    "hip": (TargetKind.AMD,),
}


@lru_cache(maxsize=1024)
def split_words(name: str) -> tuple[str, ...]:
    return tuple(word for word in _SEPARATORS.split(name.lower()) if word)


def match_device(name: str, ids: Iterable[str]) -> list[str]:
    """Return the ids that have all words of a name, or all of them written as one."""
    words = split_words(name)
    return [each for each in sorted(ids) if words and (set(words) <= set(split_words(each)) or "".join(words) in split_words(each))]


def match_group(name: str, specs: Sequence[HardwareSpec]) -> list[str]:
    """Return the ids of all devices of a kind or maker, or with an architecture."""
    word = "-".join(split_words(name))
    if word == ALL:
        return [spec.id for spec in specs]
    if word in _KINDS:
        return [spec.id for spec in specs if spec.family in _KINDS[word]]
    arch = arch_named(name.lower())
    if arch is not None:
        return [spec.id for spec in specs if _runs(spec.arch, arch)]
    return [spec.id for spec in specs if spec.id.split("-", 1)[0] == word]


def _runs(has: Arch, wanted: Arch) -> bool:
    """Whether a device is of an architecture. Its suffix may be left out."""
    return (has.prefix, has.number) == (wanted.prefix, wanted.number) and wanted.suffix in ("", has.suffix)


def suggest_devices(name: str, ids: Sequence[str]) -> list[str]:
    """Return the ids that an unknown name is nearest to: of the same maker, if the name begins with one."""
    words = split_words(name)
    same_maker = [each for each in ids if words and each.split("-", 1)[0] == words[0]]
    known, models = same_maker or list(ids), [word for word in words[bool(same_maker) :] if len(word) > 1]
    shared = [each for each in known if any(model in split_words(each) for model in models)]
    inside = shared or [each for each in known if any(model in each for model in models)]
    by_words = {word: each for each in known for word in split_words(each)[1:]}
    nearest = [by_words[word] for model in models for word in get_close_matches(model, by_words, cutoff=0.5)]
    return list(dict.fromkeys(inside or nearest))[:MAX_SUGGESTIONS]
