"""The evaluator: is a candidate right, and how fast is it? See judge.py for who knows what, and EVALUATOR in the docs for the
protocol. `Evaluator` owns the processes; `Evaluator.evaluate` gives a Verdict."""

from __future__ import annotations

from .judge import Evaluator

__all__ = ["Evaluator"]
