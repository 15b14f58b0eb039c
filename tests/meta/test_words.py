"""Words that docs/conventions.md rules out: in names of the packages, in docstrings, in comments and in the docs.

Names that generated source gets from string literals are checked, too; none may have such a word.

`words_allowed.json` counts the uses that are left in each file, and only shrinks: the test fails where a count is
higher or lower. `python tests/meta/test_words.py --shrink` lowers the counts to what is there; it never raises one.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = Path(__file__).with_name("words_allowed.json")
IDENTIFIERS, PROSE = "identifiers", "prose"

DENIED_IN_NAMES = frozenset(
    re.split(
        r"\s+",
        "room rooms turn turns turned walk walks walked promise promises promised promising beside ahead dealt woven "
        "judge judged planted noun nouns kept held hinted lie lies twin twins peer peers outcome outcomes ask asked "
        "told anew ours handicap handicaps demands demanded touched reach reaches",
    )
)
# Names that users' files or other programs read: they keep their words.
NAMES_THAT_STAY = {
    "hinted_gain": "field of hardware specs: calibrated files of users have it",
}
DENIED_IN_PROSE = {
    "at hand": r"\bat hand\b",
    "past the caches": r"\bpast (the )?caches\b",
    "so many": r"\bso many\b",
    # "there is no device", "is no longer read" and "is no slower than" are English.
    "is no": r"(?<!\bthere )\bis no (?!longer\b|\w+er than\b|more than\b|less than\b)",
    "are no": r"(?<!\bthere )\bare no (?!longer\b|\w+er than\b|more than\b|less than\b)",
    "beside the": r"\bbeside the\b",
    "anew": r"\banew\b",
}
DENIED_OPENINGS = ("Of", "What", "Those")
# Pages that quote the words: the table of old names.
PAGES_THAT_QUOTE = {"docs/glossary.md": ("## Old names",)}

# Packages whose string literals become names in generated source.
GENERATORS = ("codegen", "families", "schedule")

Counts = dict[str, dict[str, int]]


def split_words(name: str) -> list[str]:
    """`RowWalk`, `row_walk` and `ROW_WALK` → `["row", "walk"]`."""
    parts = re.sub(r"([a-z0-9])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3 \2\4", name).replace("_", " ").split()
    return [part.lower() for part in parts]


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, parameters, variables and fields."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def comments(source: str) -> Iterator[str]:
    """Yield each block of comment lines as one text."""
    block: list[str] = []
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last_line + 1 and block:
            yield " ".join(block)
            block = []
        block.append(token.string.lstrip("#: "))
        last_line = token.start[0]
    if block:
        yield " ".join(block)


def count_names(tree: ast.AST) -> Counter[str]:
    """Count the denied words in the names that a module defines."""
    names = (name for name in defined_names(tree) if name not in NAMES_THAT_STAY)
    return Counter(word for name in names for word in split_words(name) if word in DENIED_IN_NAMES)


def count_literals(source: str) -> Counter[str]:
    """Count the denied words in string literals that are names: `kernel0.rows`, or parts of them in f-strings."""
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    names = (value for value in constants if isinstance(value, str) and re.fullmatch(r"[\w.]+", value))
    return Counter(word for name in names for word in split_words(name.replace(".", " ")) if word in DENIED_IN_NAMES)


def count_phrases(text: str) -> Counter[str]:
    """Count the denied phrases in one text, across line ends."""
    joined = " ".join(text.split())
    found = {phrase: len(re.findall(pattern, joined, re.IGNORECASE)) for phrase, pattern in DENIED_IN_PROSE.items()}
    return Counter({phrase: count for phrase, count in found.items() if count})


def may_have_phrases(source: str) -> bool:
    """Return whether what follows the first `#` of lines has a denied phrase: tokens, which are exact, take long to read."""
    lines = (line.partition("#")[2].lstrip("#: ") if "#" in line else "|" for line in source.splitlines())
    return bool(count_phrases(" ".join(lines)))


def count_prose(tree: ast.AST, source: str) -> Counter[str]:
    """Count the denied phrases and openings in a module's docstrings and comments."""
    counts: Counter[str] = Counter()
    for text in docstrings(tree):
        counts += count_phrases(text)
        opening = re.match(rf"({'|'.join(DENIED_OPENINGS)})\b", text)
        if opening is not None:
            counts[f"{opening[1]} ..."] += 1
    for text in comments(source) if may_have_phrases(source) else ():
        counts += count_phrases(text)
    return counts


@functools.cache
def counted() -> dict[str, Counts]:
    """Return the uses that are there: kind → file → word → count."""
    counts: dict[str, Counts] = {IDENTIFIERS: {}, PROSE: {}}
    for path in sorted((*(ROOT / "roller_svc").rglob("*.py"), *(ROOT / "bench").rglob("*.py"))):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        tree = ast.parse(source)
        for kind, words in ((IDENTIFIERS, count_names(tree)), (PROSE, count_prose(tree, source))):
            if words:
                counts[kind][name] = dict(sorted(words.items()))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        for heading in PAGES_THAT_QUOTE.get(name, ()):
            text = re.sub(rf"^{heading}$.*?(?=^## |\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
        words = count_phrases(text)
        if words:
            counts[PROSE][name] = dict(sorted(words.items()))
    return counts


def shrunk(allowed: Counts, counts: Counts) -> Counts:
    """Return the allowed counts, each lowered to what is there."""
    lowered = {
        name: {word: min(count, counts.get(name, {}).get(word, 0)) for word, count in words.items()}
        for name, words in allowed.items()
    }
    used = {name: {word: count for word, count in words.items() if count} for name, words in lowered.items()}
    return {name: words for name, words in used.items() if words}


def more_than_allowed(counts: Counts, allowed: Counts) -> list[str]:
    return [
        f"{name}: `{word}` {count} times, {allowed.get(name, {}).get(word, 0)} allowed"
        for name, words in counts.items()
        for word, count in words.items()
        if count > allowed.get(name, {}).get(word, 0)
    ]


def read_allowed() -> dict[str, Counts]:
    content: dict[str, Counts] = json.loads(ALLOWED.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("kind", [IDENTIFIERS, PROSE])
def test_no_file_has_more_denied_words_than_allowed(kind: str) -> None:
    assert more_than_allowed(counted()[kind], read_allowed()[kind]) == []


@pytest.mark.parametrize("package", GENERATORS)
def test_generated_names_have_no_denied_word(package: str) -> None:
    counts = {
        path.relative_to(ROOT).as_posix(): dict(words)
        for path in sorted((ROOT / "roller_svc" / package).rglob("*.py"))
        if (words := count_literals(path.read_text(encoding="utf-8")))
    }
    assert counts == {}


@pytest.mark.parametrize("kind", [IDENTIFIERS, PROSE])
def test_the_allow_list_has_shrunk_to_what_is_there(kind: str) -> None:
    allowed = read_allowed()[kind]
    assert shrunk(allowed, counted()[kind]) == allowed, "run python tests/meta/test_words.py --shrink"


def test_planted_words_are_counted() -> None:
    source = '''
"""What is no module."""
# Stores that go past
# the caches.
class RowWalk:
    ahead: int
    def ask(self, *, at_hand, rooms=0):
        """Of two, the greater."""
        with self.turn as (held, returned):
            self.kept = [peer for peer in held]
'''
    tree = ast.parse(source)
    assert count_names(tree) == dict.fromkeys(["walk", "ahead", "ask", "rooms", "held", "kept", "peer"], 1)
    assert count_literals('f"{name}.room" + "m.ahead" + "a room"') == dict.fromkeys(["room", "ahead"], 1)
    assert count_prose(tree, source) == dict.fromkeys(["What ...", "is no", "past the caches", "Of ..."], 1)
    fine = '"""There is no device, and it is no longer or slower."""'
    assert count_prose(ast.parse(fine), fine) == {}
    assert more_than_allowed({"a.py": {"walk": 2}}, {"a.py": {"walk": 1}}) == ["a.py: `walk` 2 times, 1 allowed"]
    assert shrunk({"a.py": {"walk": 3, "room": 1}, "b.py": {"ask": 1}}, {"a.py": {"walk": 2}}) == {"a.py": {"walk": 2}}


def main() -> None:
    """Lower the counts of the allow list to what is there; write the list where there is none."""
    counts = counted()
    if ALLOWED.exists():
        allowed = read_allowed()
        left = [line for kind in counts for line in more_than_allowed(counts[kind], allowed[kind])]
        counts = {kind: shrunk(allowed[kind], counts[kind]) for kind in counts}
        sys.stderr.writelines(f"{line}\n" for line in left)
    ALLOWED.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for kind, files in counts.items():
        uses = sum(sum(words.values()) for words in files.values())
        sys.stdout.write(f"{kind}: {uses} uses in {len(files)} files\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--shrink"]:
        sys.exit("usage: python tests/meta/test_words.py --shrink")
    main()
