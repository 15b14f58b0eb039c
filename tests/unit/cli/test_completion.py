"""Completion in shells: what each of them offers, by the script that the command prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from roller_svc import hardware
from roller_svc.cli import main
from roller_svc.cli.command import COMMANDS, load_commands, make_parser
from roller_svc.cli.completion import find_places

# Words on the command line, the last to be completed; words that are offered for it, and words that are not.
CASES = [
    (["es"], {"estimate"}, {"explain"}),
    (["compile", "--ta"], {"--target", "--targets"}, {"--threads"}),
    (["compile", "--target", "nvidia-h"], {"nvidia-h100-sxm", "nvidia-h200-sxm"}, {"nvidia-t4"}),
    (["run", "--select", ""], {"measure", "model"}, {"compile"}),
    (["model", ""], {"compile", "run", "plan", "profile"}, {"explain"}),
    (["model", "run", "--pl"], {"--plan"}, {"--target"}),
    (["model", "run", "--winograd", "a"], {"auto", "always"}, {"never"}),
    (["estimate", "--donate", ""], set(), {"compile", "--donate"}),
    (["model", "run", "--plan", ""], {"rammer", "waves", "eager"}, {"compile"}),
    (["model", "compile", "--launcher", ""], {"ctypes", "torch", "cpp"}, {"cupy"}),
    (["compile", "--launcher", "c"], {"ctypes", "cupy", "cpp"}, {"torch"}),
    (["targets", "c"], {"check"}, {"compile"}),
    (["completion", ""], {"bash", "fish", "zsh"}, {"compile"}),
]
IDS = [" ".join(words) for words, _, _ in CASES]
BASH = """
source "$1"; shift
COMP_WORDS=(roller "$@"); COMP_CWORD=$#
_roller
for word in "${COMPREPLY[@]}"; do echo "$word"; done
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    with pytest.MonkeyPatch.context() as patch:
        for shell in ("bash", "zsh", "fish"):
            with (folder / shell).open("w", encoding="utf-8") as file:
                patch.setattr("sys.stdout", file)
                assert main(["completion", shell]) == 0
    return folder


def shell(*command: str) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stderr == ""
    return {line.partition("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize(("words", "offered", "others"), CASES, ids=IDS)
def test_bash_offers_what_may_stand_there(words: list[str], offered: set[str], others: set[str], scripts: Path) -> None:
    found = shell("bash", "--norc", "-c", BASH, "bash", str(scripts / "bash"), *words)
    assert offered <= found
    assert not others & found
    assert all(word.startswith(words[-1]) for word in found)


# bash makes three words of one with an equals sign, unless COMP_WORDBREAKS lacks the sign.
@pytest.mark.parametrize(
    ("words", "flag", "count"),
    [
        (["--target", "=", "nvidia-h"], "", 2),
        (["--target", "="], "", len(hardware.ids())),
        (["--target=nvidia-h"], "--target=", 2),
        (["--target="], "--target=", len(hardware.ids())),
    ],
    ids=str,
)
def test_bash_completes_the_value_of_a_flag_with_an_equals_sign(words: list[str], flag: str, count: int, scripts: Path) -> None:
    found = shell("bash", "--norc", "-c", BASH, "bash", str(scripts / "bash"), "compile", *words)
    assert found <= {f"{flag}{name}" for name in hardware.ids()}
    assert (len(found), f"{flag}nvidia-h200-sxm" in found) == (count, True)


@pytest.mark.needs("fish")
@pytest.mark.parametrize(("words", "offered", "others"), CASES, ids=IDS)
def test_fish_offers_what_may_stand_there(words: list[str], offered: set[str], others: set[str], scripts: Path) -> None:
    found = shell("fish", "--no-config", "-c", f"source {scripts}/fish; complete -C '{' '.join(['roller', *words])}'")
    assert offered <= found
    assert not others & found


@pytest.mark.needs("zsh")
def test_zsh_completes_by_the_function_of_bash(scripts: Path) -> None:
    """Its `compgen` returns all words, and the line editor takes those that begin so."""
    text = f"source {scripts}/zsh; emulate sh; COMP_WORDS=(roller compile --target nvidia-h); COMP_CWORD=3; _roller"
    found = shell("zsh", "-f", "-c", f'setopt ksharrays; {text}; for word in "${{COMPREPLY[@]}}"; do echo "$word"; done')
    assert found == set(hardware.ids())


@pytest.mark.needs("zsh")
def test_zsh_completes_the_value_of_a_flag_with_an_equals_sign(scripts: Path) -> None:
    text = f"source {scripts}/zsh; emulate sh; COMP_WORDS=(roller compile --target=nvidia-h); COMP_CWORD=2; _roller"
    found = shell("zsh", "-f", "-c", f'setopt ksharrays; {text}; for word in "${{COMPREPLY[@]}}"; do echo "$word"; done')
    assert found == {f"--target={name}" for name in hardware.ids()}


@pytest.mark.needs("zsh")
def test_the_script_for_zsh_starts_completion_only_where_it_is_off(scripts: Path) -> None:
    assert shell("zsh", "-f", "-c", f"source {scripts}/zsh; echo ${{+functions[compdef]}}") == {"1"}
    assert shell("zsh", "-f", "-c", f"compdef() {{ echo kept }}; source {scripts}/zsh") == {"kept"}


def test_every_subcommand_and_option_has_a_place() -> None:
    places = {place.name: place for place in find_places(make_parser(load_commands()), ("roller",))}
    assert [name for name, _ in places["roller"].subcommands] == list(COMMANDS)
    assert {f"roller {name}" for name in COMMANDS} <= places.keys()
    assert {"--input", "--target", "--donate", "--strict", "--help"} <= set(places["roller estimate"].flags)
    assert {"roller store gc", "roller keys add", "roller operations watch", "roller model profile"} <= places.keys()


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
