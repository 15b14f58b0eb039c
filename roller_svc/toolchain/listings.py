"""Lines of PTX, SASS and assembly, and the lines of the source that they come from.

The source is compiled a second time, with line numbers. These change no instruction of the listing: what is left of
the second listing without its line numbers must be the first one, or no line is linked.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from roller_svc.ir.kernel import KernelSource
from roller_svc.toolchain.binaries.sass import sass_text
from roller_svc.toolchain.gcc import compile_assembly
from roller_svc.toolchain.nvrtc import compile_cuda, ptx

LINE_INFO = "-lineinfo"
DIFFERENT = "compiled with line numbers the code differs, so its lines are not linked"


@dataclass(frozen=True, slots=True)
class Link:
    """Lines of a listing, from 1, and the lines of the source that they come from: the innermost call first."""

    first: int
    last: int
    source: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Links:
    """How the lines of a listing are linked with those of the source."""

    links: tuple[Link, ...] = ()
    note: str = ""  # why there are none


@dataclass(frozen=True, slots=True)
class LinkedListing:
    """A listing without line numbers, and for each of its lines those of the source."""

    text: str
    sources: tuple[tuple[int, ...], ...]

    @property
    def links(self) -> tuple[Link, ...]:
        """Return the links of runs of lines."""
        links: list[Link] = []
        for line, source in enumerate(self.sources, 1):
            if source and links and (links[-1].last, links[-1].source) == (line - 1, source):
                links[-1] = replace(links[-1], last=line)
            elif source:
                links.append(Link(line, line, source))
        return tuple(links)


def link_ptx(source: KernelSource) -> Links:
    """Link the lines of a CUDA kernel's PTX. Raises as `ptx` does."""
    return _links(ptx(source), read_ptx(ptx(_with_lines(source)), f"{source.name}.cu"))


def link_sass(source: KernelSource, binary: bytes) -> Links:
    """Link the lines of a cubin's SASS. Raises as `compile_cuda` and `sass_text` do."""
    again = compile_cuda(_with_lines(source)).binary
    name = f"{source.name}.cu"
    return _links(sass_text(binary), _link_products(read_sass(sass_text(again, lines=True), name), source))


_PRODUCT, _PTX_PRODUCT = re.compile(r"\b[HIQ]GMMA\."), re.compile(r"\bwgmma\.mma_async\b")


def _link_products(listing: LinkedListing, source: KernelSource) -> LinkedListing:
    """Link the products of warpgroups, to which ptxas gives no lines, by those of PTX.

    They are volatile, so that their order is the same. Where their numbers differ, they are not linked.
    """
    numbers = [number for number, line in enumerate(listing.text.split("\n")) if _PRODUCT.search(line)]
    if not numbers:
        return listing
    linked = read_ptx(ptx(_with_lines(source)), f"{source.name}.cu")
    found = [own for line, own in zip(linked.text.split("\n"), linked.sources, strict=True) if _PTX_PRODUCT.search(line)]
    products = dict(zip(numbers, found if len(found) == len(numbers) else [()] * len(numbers), strict=True))
    return replace(listing, sources=tuple(products.get(number, own) for number, own in enumerate(listing.sources)))


def assembly(source: KernelSource) -> LinkedListing:
    """Return the assembly of a C kernel with its links. Raises as `compile_c` does."""
    return read_assembly(compile_assembly(source))


def _with_lines(source: KernelSource) -> KernelSource:
    return replace(source, options=(*source.options, LINE_INFO))


def _links(plain: str, linked: LinkedListing) -> Links:
    return Links(linked.links) if linked.text.strip() == plain.strip() else Links(note=DIFFERENT)


_PTX_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')
_PTX_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*\binlined_at\s+(\d+)\s+(\d+)\s+\d+)?")
_PTX_LABEL = re.compile(r"\s*\$L__(tmp|info_string|func_begin|func_end)\w*:\s*$")
_DEBUG_SECTION = re.compile(r"\s*\.section\s+\.debug")


def read_ptx(text: str, name: str) -> LinkedListing:
    """Take the line numbers out of PTX; `name` is that of the source's file."""
    lines = list(itertools.takewhile(lambda line: not _DEBUG_SECTION.match(line), text.split("\n")))
    files = {match[1] for match in map(_PTX_FILE.match, lines) if match and match[2].endswith(name)}

    def lines_of(match: re.Match[str]) -> tuple[int, ...]:
        places = ((match[1], match[2]), (match[3], match[4]))
        return tuple(int(line) for file, line in places if file in files and int(line))

    left = (line for line in lines if not (_PTX_LABEL.match(line) or _PTX_FILE.match(line)))
    return _take_out(left, _PTX_LOC, lines_of)


_SASS_LOC = re.compile(r'\s*//## File "([^"]*)", line (\d+)(?: inlined at "([^"]*)", line (\d+))?')


def read_sass(text: str, name: str) -> LinkedListing:
    """Take the line numbers out of SASS; `name` is that of the source's file."""

    def lines_of(match: re.Match[str]) -> tuple[int, ...]:
        places = ((match[1], match[2]), (match[3], match[4]))
        return tuple(int(line) for file, line in places if file and file.endswith(name))

    return _take_out(text.split("\n"), _SASS_LOC, lines_of, is_chain=True)


_ASSEMBLY_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\b")
# Directives for debuggers and unwinding.
_ASSEMBLY_NOISE = re.compile(r"\s*\.(file|cfi_\w+|ident|addrsig\w*)\b")
_LABEL = re.compile(r"\.L\w+")


def read_assembly(text: str) -> LinkedListing:
    """Take line numbers and all that is for debuggers out of the assembly of one file."""
    lines = itertools.takewhile(lambda line: not _DEBUG_SECTION.match(line), text.split("\n"))
    left = [line for line in lines if not _ASSEMBLY_NOISE.match(line)]
    used = {label for line in left if not (line.startswith(".L") or _ASSEMBLY_LOC.match(line)) for label in _LABEL.findall(line)}
    left = [line for line in left if not line.startswith(".L") or line.partition(":")[0] in used]
    return _take_out(left, _ASSEMBLY_LOC, lambda match: (int(match[2]),) if int(match[2]) else ())


def _take_out(
    lines: Iterable[str],
    place: re.Pattern[str],
    lines_of: Callable[[re.Match[str]], tuple[int, ...]],
    *,
    is_chain: bool = False,
) -> LinkedListing:
    """Take the lines out that say a place in the source, and link those that follow each.

    Of adjacent places the last one counts, or with `is_chain` all do: each is where the one before it was called.
    """
    text: list[str] = []
    sources: list[tuple[int, ...]] = []
    current: tuple[int, ...] = ()
    is_open = False  # whether the last line was a place
    for line in lines:
        match = place.match(line)
        if match:
            outer = current if is_chain and is_open else ()
            current = tuple(dict.fromkeys((*outer, *lines_of(match))))
        else:
            text.append(line)
            sources.append(current if _is_instruction(line) else ())
        is_open = match is not None
    return LinkedListing("\n".join(text), tuple(sources))


def _is_instruction(line: str) -> bool:
    """Whether a line of a listing has an instruction, rather than a label, a directive or a comment."""
    word = line.strip()
    return bool(word) and not word.startswith((".", "//", "{", "}", ")", "#", "$")) and not word.endswith(":")
