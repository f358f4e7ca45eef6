"""Every model card: what it promises is what its stock transformers model holds, in every variant."""

from __future__ import annotations

import collections

import pytest
import torch

from jasperk_inductor.api import Workload, sites
from jasperk_inductor.errors import UnknownName
from jasperk_inductor.models import Session, by_letter, card, cards

CARDS = sorted(cards())


def counts(found) -> dict[str, int]:
    (traced,) = found
    assert traced.kept == ()
    return dict(collections.Counter(s.family for s in traced.sites))


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_expected_sites(name: str, phase: str, dtype: str, dynamic: bool | None) -> None:
    work = Workload(name, "tiny", phase=phase, batch=2, dtype=dtype, dynamic=dynamic)
    assert counts(work.sites()) == card(name).expected_sites("tiny")


def test_tiny_qwen_by_letter() -> None:
    expected = card("qwen3_8").expected_sites("tiny")
    letters = card("qwen3_8").LETTERS
    assert {letters[f]: n for f, n in expected.items()} == {"A": 4, "B": 4, "C": 3, "D": 4, "E": 1, "F": 8, "G": 4, "H": 3, "I": 1}


@pytest.mark.parametrize("name", CARDS)
def test_full_size_without_its_memory(name: str) -> None:
    work = Workload(name, "full", layers=8, dtype="bfloat16", batch=4)
    assert counts(work.sites()) == card(name).expected_sites("full", layers=8)


@pytest.mark.parametrize(("eps", "norms"), [(1e-5, None), (1e-6, torch.float32)])
def test_another_eps_and_fp32_norm_weights(eps: float, norms: torch.dtype | None) -> None:
    chosen = card("qwen3_8")
    model = chosen.build(chosen.config("tiny", rms_norm_eps=eps), dtype=torch.bfloat16)
    if norms is not None:
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.to(norms)
    session = Session(model, 2, 5, 16)
    with torch.no_grad():
        session.prefill()
        assert counts(sites(model, **session.arguments(session.prompt[:, :1]))) == chosen.expected_sites("tiny")


def test_prefill_and_decode_share_their_problems() -> None:
    problems = [
        {s.problem.hash for t in Workload("qwen3_8", "tiny", phase=p, batch=2).sites() for s in t.sites} for p in ("prefill", "decode")
    ]
    assert problems[0] == problems[1]


def test_random_weights_leave_no_norm_an_identity() -> None:
    chosen = card("qwen3_8")
    model = chosen.build(chosen.config("tiny"))
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if "norm" in name:
            assert float(parameter.std()) > 0.1, name


def test_a_session_rewinds_to_its_mark() -> None:
    chosen = card("qwen3_8")
    session = Session(chosen.build(chosen.config("tiny")), 2, 5, 16)
    with torch.no_grad():
        token = session.prefill().argmax(-1, keepdim=True)
        session.mark()
        first = session.decode(token)
        second = session.decode(token)
        session.rewind()
        assert torch.equal(session.decode(token), first)
        assert not torch.equal(first, second)

        def run_over() -> None:
            for _ in range(20):
                session.decode(token)

        with pytest.raises(ValueError, match="holds 16 tokens"):
            run_over()


def test_names_and_letters() -> None:
    chosen = card("qwen3_8")
    assert by_letter(chosen, ["A", "g", "qk_norm_rope"]) == ["ffn_down", "silu_mul", "qk_norm_rope"]
    with pytest.raises(UnknownName, match="no family 'Z'"):
        by_letter(chosen, ["Z"])
    with pytest.raises(UnknownName, match="'qwen3_8'"):
        card("qwen3")
    with pytest.raises(UnknownName, match="'tiny'"):
        chosen.config("tyni")
