"""From a Dynamo graph to Sites.

Every family looks for its occurrences; each becomes a Site with its Problem, or is Kept for a reason that a person can act on.
Nothing is executed and nothing is changed here. Sites never overlap: the first family, in the order of their names, wins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from . import reference
from .contract import Family, Kept, Match, Problem, Site, TensorSpec
from .families import families
from .graph import GraphView, module_path, value_of

log = logging.getLogger("jasperk")


class _Unfit(Exception):
    """Why a match is no site; the message becomes the reason of a Kept."""


def sites(graph: fx.Graph, only: Mapping[str, Family] | None = None, target: str | None = None) -> tuple[list[Site], list[Kept]]:
    """All sites of a Dynamo graph, and the matches that cannot be sites.

    Args:
        graph: as Dynamo hands it to a backend; its nodes carry `example_value`.
        only: the families to look for; default all.
        target: the kind of device it is meant to run on, where the graph was traced on another ("meta"); default its own.
    """
    view = GraphView(graph)
    found: list[Site] = []
    kept: list[Kept] = []
    claimed: set[fx.Node] = set()
    for family in (only if only is not None else families()).values():
        for match in _matches(family, view, kept):
            if (target or value_of(next(iter(match.inputs.values()))).device.type) not in family.devices:
                continue
            module = _module(match)
            try:
                if view.transformed:
                    raise _Unfit(f"it is inside a function transform ({view.transformed}), which has no rule for jasperk's operators")
                site = _site(view, family, match, module)
                own = set(site.nodes) - set(match.recomputed)
                if claimed & own:
                    raise _Unfit("it overlaps a site of another family")
            except (_Unfit, reference.NotWritable) as unfit:
                kept.append(Kept(family.name, module, 0, str(unfit)))
                continue
            except Exception as error:  # one strange node must not cost the graph its other sites
                log.debug("a match of %s", family.name, exc_info=True)
                kept.append(Kept(family.name, module, 0, f"jasperk cannot read its subgraph ({type(error).__name__}: {error})"))
                continue
            claimed |= own
            found.append(site)
    return _ordered(view, found, kept), kept


def _matches(family: Family, view: GraphView, kept: list[Kept]) -> list[Match]:
    try:
        return list(family.find(view))
    except Exception as error:
        log.debug("looking for %s", family.name, exc_info=True)
        kept.append(Kept(family.name, "", 0, f"jasperk cannot read this graph ({type(error).__name__}: {error})"))
        return []


def _ordered(view: GraphView, found: list[Site], kept: list[Kept]) -> list[Site]:
    """Sites in the order of their places. A site whose place is before that of a site that feeds it is Kept."""
    order = sorted(found, key=lambda s: (view.position[s.before], view.position[s.outputs[0]]))
    while True:
        index = {output: i for i, site in enumerate(order) for output in site.outputs}
        early = next((s for i, s in enumerate(order) if any(index.get(n, -1) > i for n in s.inputs)), None)
        if early is None:
            return order
        order.remove(early)
        kept.append(Kept(early.family, early.module, early.rows, "an input is ready only after an output is first used"))


def _module(match: Match) -> str:
    """The module a match belongs to: its last output's own, or what siblings have in common."""
    paths = [module_path(node).split(".") for node in match.outputs.values()]
    siblings = len({tuple(p[:-1]) for p in paths}) == 1 and len({p[-1] for p in paths}) > 1
    return ".".join(paths[-1][:-1] if siblings else paths[-1])


def _site(view: GraphView, family: Family, match: Match, module: str) -> Site:
    inputs = dict(match.inputs)
    inside = view.between([*inputs.values(), *match.constants], match.outputs.values())
    if isinstance(inside, fx.Node):
        raise _Unfit(f"it also depends on {inside.name}")
    before = view.place(inside, [*inputs.values()], list(match.outputs.values()), match.recomputed)
    if isinstance(before, str):
        raise _Unfit(before)
    if any(value_of(o).requires_grad for o in match.outputs.values()):
        raise _Unfit("a gradient is needed here; jasperk's kernels are for inference (run under torch.no_grad())")
    devices = {value_of(n).device.type for n in [*inputs.values(), *match.outputs.values()]}
    if len(devices) != 1:
        raise _Unfit(f"its tensors are on several kinds of device ({', '.join(sorted(devices))})")
    sizes: dict[str, int] = {}
    dynamic = False
    specs: dict[str, TensorSpec] = {}
    for role, node in [*inputs.items(), *match.outputs.items()]:
        names = match.dims[role]
        value = value_of(node)
        if len(names) != value.dim():
            raise _Unfit(f"{role} has {value.dim()} dimensions, not {len(names)}")
        dims: list[int | str] = []
        for name, size in zip(names, value.shape, strict=True):
            if name is None:
                if not is_concrete_int(size):
                    raise _Unfit(f"a size of {role} that must be fixed is symbolic ({size})")
                dims.append(int(size))
                continue
            dynamic = dynamic or not is_concrete_int(size)
            hint = _hint(size)
            if sizes.setdefault(name, hint) != hint:
                raise _Unfit(f"{role} and the other inputs disagree about a size ({sizes[name]} and {hint})")
            dims.append(name)
        output = role not in inputs
        layout = "contiguous" if output else _layout(value)
        kind = match.kinds.get(role, "activation")
        specs[role] = TensorSpec(role, tuple(dims), str(value.dtype).removeprefix("torch."), layout, _align(value), kind)
    if any(size == 0 for size in sizes.values()):
        raise _Unfit("it is empty")
    parameters = {value_of(inputs[role]).dtype for role, kind in match.kinds.items() if kind == "matrix"}
    if parameters and parameters != {value_of(next(iter(inputs.values()))).dtype}:
        raise _Unfit("its weights and its input have different types (autocast is on around it?)")
    constants = {node: _float(node) for node in match.constants}
    params = {k: constants[v] if isinstance(v, fx.Node) else v for k, v in match.params.items()}
    problem = Problem(
        family=family.name,
        reference=reference.write(inside, inputs, match.outputs.values(), constants),
        inputs=tuple(specs[r] for r in inputs),
        outputs=tuple(specs[r] for r in match.outputs),
        params=tuple(sorted(params.items())),
        tolerance=family.tolerance,
    )
    _check_alone(problem, [value_of(n) for n in inputs.values()], [value_of(n) for n in match.outputs.values()])
    return Site(module, problem, sizes, dynamic, tuple(inside), tuple(inputs.values()), tuple(match.outputs.values()), before)


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    if (hint := size.node.hint) is None:
        raise _Unfit(f"a size ({size}) depends on the data")
    return int(hint)


def _float(node: fx.Node) -> float:
    """The value of a SymFloat, made constant: torch guards on it, so a later change recompiles instead of being missed."""
    value = value_of(node)
    return float(value)


def _layout(value: torch.Tensor) -> str:
    """The layout class of an input; see TensorSpec."""
    if value.dim() == 0 or value.is_contiguous():
        return "contiguous"
    shape, stride = [_hint(s) for s in value.shape], [_hint(s) for s in value.stride()]
    if stride[-1] != 1:
        return "scattered"
    if value.dim() >= 2:
        pitch = stride[-2]
        packed = [pitch]
        for size in reversed(shape[1:-1]):
            packed.insert(0, packed[0] * size)
        if pitch >= shape[-1] and all(a == b or n == 1 for a, b, n in zip(packed, stride[:-1], shape[:-1], strict=True)):
            return f"pitched:{pitch}"
    return "strided"


def _align(value: torch.Tensor) -> int:
    """16 if rows start at multiples of 16 bytes within their storage (which allocators align), else the item size."""
    size = value.element_size()
    offsets = [value.storage_offset(), *(s for s, n in zip(value.stride()[:-1], value.shape[:-1], strict=True) if n != 1)]
    return 16 if all((_hint(o) * size) % 16 == 0 for o in offsets) else size


_seen: dict[tuple[Any, ...], str | None] = {}


def _check_alone(problem: Problem, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """The subgraph, run alone on fake inputs, must give what the graph recorded. It does not under autocast, for one."""
    key = (problem.hash, *((tuple(map(_hint, t.shape)), t.dtype, t.device.type) for t in (*inputs, *outputs)))
    if key not in _seen:
        fakes = [torch.empty([_hint(s) for s in t.shape], dtype=t.dtype, device="meta") for t in inputs]
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            got = reference.load(problem.reference)(*fakes)
        wanted = [(tuple(map(_hint, t.shape)), t.dtype) for t in outputs]
        same = [(tuple(t.shape), t.dtype) for t in got] == wanted
        _seen[key] = None if same else "run alone it gives other shapes or types (autocast is on around it?)"
    if (reason := _seen[key]) is not None:
        raise _Unfit(reason)
