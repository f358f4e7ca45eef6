"""Finds the model cards: every file of `models/`. And what is the same for all of them: one prefill, one decode step.

A card gives a name, letters for its families (`LETTERS`: those with a row in the ledger; `BEYOND`: others), HF configurations by
size, `expected_sites` and `build`. To add a model, add its
card.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .errors import MissingTool, UnknownName, nearest
from .folders import package


@functools.cache
def cards() -> dict[str, ModuleType]:
    """Every model card by name.

    Raises:
        MissingTool: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingTool("model cards need transformers: `pip install 'transformers>=5.17'`.")
    names = sorted(path.stem for path in package("jasperk_models").glob("*.py"))
    modules = [importlib.import_module(f"jasperk_models.{name}") for name in names]
    return {module.NAME: module for module in modules}


def card(name: str) -> Any:
    """The model card of that name.

    Raises:
        UnknownName: there is none; the message names the nearest.
    """
    try:
        return cards()[name]
    except KeyError:
        raise UnknownName(f"no model card {name!r}.{nearest(name, cards())}") from None


def letters(chosen: Any) -> dict[str, str]:
    """Family -> letter: the published families of a card, and those beyond them."""
    return {**chosen.LETTERS, **getattr(chosen, "BEYOND", {})}


def by_letter(chosen: Any, names: list[str]) -> list[str]:
    """Family names for a list of names or letters of a card.

    Raises:
        UnknownName: a name that is neither.
    """
    known = letters(chosen)
    families = {letter: family for family, letter in known.items()}
    found = []
    for name in names:
        family = families.get(name.upper(), name)
        if family not in known:
            raise UnknownName(f"{chosen.TITLE} has no family {name!r}.{nearest(name, [*families, *known])}")
        found.append(family)
    return found


class Session:
    """A model with a static cache: prefill once, then decode step by step.

    Args:
        model: a causal LM of transformers.
        batch: sequences.
        context: tokens of the prefill.
        capacity: tokens that the cache can hold.
    """

    def __init__(self, model: Any, batch: int, context: int, capacity: int, seed: int = 0) -> None:
        from transformers import StaticCache

        self.model, self.batch, self.context, self.capacity = model, batch, context, capacity
        self.config: Any = model.config
        self.device = next(model.parameters()).device
        # transformers renamed the argument in 5.2x; the old name still works there, but warns.
        names = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.cache = StaticCache(config=self.config, max_cache_len=capacity)
        generator = torch.Generator().manual_seed(seed)
        self.prompt = torch.randint(0, self.config.vocab_size, (batch, context), generator=generator).to(self.device)
        self.position = 0
        # Made once: a step should time the model, not the making of its arguments.
        self._positions = torch.arange(capacity, device=self.device).unsqueeze(0).expand(batch, -1).contiguous()

    def arguments(self, ids: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments of a forward call for the next tokens."""
        positions = self._positions[:, self.position : self.position + ids.shape[1]].contiguous()
        return {"input_ids": ids, self._cache_name: self.cache, "use_cache": True, "logits_to_keep": 1, "position_ids": positions}

    def reset(self) -> None:
        """Empties the cache, in place: a compiled step stays valid."""
        self.cache.reset()
        self.position = 0

    def mark(self) -> None:
        """Remembers the cache as it is now, for `rewind`."""
        self._mark = (self.position, [_snapshot(vars(layer)) for layer in self.cache.layers])

    def rewind(self) -> None:
        """Puts the cache back to the mark, in place: a compiled step stays valid."""
        self.position, layers = self._mark
        for layer, saved in zip(self.cache.layers, layers, strict=True):
            for name, value in saved.items():
                setattr(layer, name, _restore(getattr(layer, name), value))

    def prefill(self, forward: Callable[..., Any] | None = None) -> torch.Tensor:
        """Runs the prompt; logits of its last token, (batch, vocabulary)."""
        return self._step(forward, self.prompt)

    def decode(self, tokens: torch.Tensor, forward: Callable[..., Any] | None = None) -> torch.Tensor:
        """One step; tokens (batch, 1) to logits (batch, vocabulary)."""
        return self._step(forward, tokens)

    def _step(self, forward: Callable[..., Any] | None, ids: torch.Tensor) -> torch.Tensor:
        if self.position + ids.shape[1] > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens; {self.position + ids.shape[1]} are needed")
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        logits = (self.model if forward is None else forward)(**self.arguments(ids)).logits[:, -1]
        self.position += ids.shape[1]
        return logits


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: _snapshot(v) for k, v in value.items()}
    return [_snapshot(v) for v in value] if isinstance(value, list) else value


def _restore(live: Any, saved: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor) and live.shape == saved.shape:
        return live.copy_(saved)
    if isinstance(saved, dict) and isinstance(live, dict):
        return {k: _restore(live.get(k), v) for k, v in saved.items()}
    if isinstance(saved, list) and isinstance(live, list) and len(live) == len(saved):
        live[:] = [_restore(a, b) for a, b in zip(live, saved, strict=True)]
        return live
    return saved
