from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jasperk_inductor.errors import UnknownOption
from jasperk_inductor.settings import Options, default_cache_dir


def test_defaults() -> None:
    options = Options.parse(None)
    assert (options.beat, options.budget_s, options.optimizer, options.mode, options.strict) == (
        "inductor",
        60.0,
        "library",
        "default",
        False,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budgets": 3}, "'budget_s'"),
        ({"beat": "cublas"}, "inductor"),
        ({"budget_s": "long"}, "int or float"),
        ({"budget_s": -1}, "at least 0"),
        ({"strict": 1}, "bool"),
        ({"budget_s": True}, "int or float"),
        ({"families": "ffn_down"}, "families"),
        ({"cache_dir": 3}, "cache_dir"),
    ],
)
def test_a_wrong_option_says_what_is_right(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UnknownOption, match=said):
        Options.parse(given)


def test_mode_as_keyword_and_option_must_agree() -> None:
    assert Options.parse(None, "max-autotune").mode == "max-autotune"
    assert Options.parse({"mode": "reduce-overhead"}, "reduce-overhead").mode == "reduce-overhead"
    with pytest.raises(UnknownOption, match="disagree"):
        Options.parse({"mode": "default"}, "reduce-overhead")


def test_families_on_and_off() -> None:
    assert Options.parse({}).allows("ffn_down")
    assert not Options.parse({"families": {"ffn_down": False}}).allows("ffn_down")
    assert Options.parse({"families": {"ffn_down": False}}).allows("silu_mul")
    assert not Options.parse({"families": ["silu_mul"]}).allows("ffn_down")


def test_cache_dir_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JASPERK_CACHE_DIR", "~/somewhere")
    assert default_cache_dir() == Path.home() / "somewhere"
    monkeypatch.delenv("JASPERK_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/jasperk")
