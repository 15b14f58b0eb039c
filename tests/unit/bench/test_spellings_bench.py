"""The benchmark of spellings: its programs, ratios to plain forms, and calls in turns."""

from __future__ import annotations

import json

import pytest

from roller_bench import spellings

MAX_RATIO = 1.3


@pytest.mark.slow
@pytest.mark.parametrize("target", spellings.TARGETS.split(","))
def test_no_spelling_takes_much_longer_than_its_plain_form(target: str) -> None:
    ratios = spellings.estimated_ratios(target)
    assert ratios.keys() == spellings.SPELLINGS.keys()
    assert max(ratios.values()) < MAX_RATIO


def test_both_are_called_in_turns() -> None:
    calls: list[str] = []
    own, plain = spellings.time_in_turns(lambda: calls.append("own"), lambda: calls.append("plain"), 0.0, 1)
    assert len(own) == len(plain) == spellings.MIN_PAIRS
    assert calls == ["own", "plain"] * (spellings.MIN_PAIRS + spellings.WARM_UP)


def test_the_report_names_its_baseline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "square(a - b), allowed"
    small = {name: (text, size, (32, 32, 32)) for name, (text, size, _) in spellings.PLAIN.items()}
    monkeypatch.setattr(spellings, "PLAIN", small)
    monkeypatch.setattr(spellings, "set_num_threads", lambda threads: None)  # of this process
    spellings.main(["--targets", "", "--time", "--seconds", "0", "--only", name])
    report = json.loads(capsys.readouterr().out)
    assert report["baseline"].startswith("the plain form")
    assert report["machine"]["threads"] == 1
    assert report["measured"].keys() == {name}
    assert report["measured"][name]["median"] > 0
