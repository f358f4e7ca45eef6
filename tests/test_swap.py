from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Layer, graphs, scale_problem
from torch import fx

from jasperk_inductor import reference, swap, trace
from jasperk_inductor.contract import Problem

PROBLEM = scale_problem()


def double_plus_one(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2 + 1,)


def test_names_follow_content() -> None:
    identity = swap.operator(PROBLEM, {})
    one = swap.operator(PROBLEM, {4: ("entry1", double_plus_one)})
    other = swap.operator(PROBLEM, {4: ("entry2", double_plus_one)})
    assert len({identity.name, one.name, other.name, swap.operator(scale_problem(width=65), {}).name}) == 4
    assert swap.operator(PROBLEM, {4: ("entry1", double_plus_one)}) is one
    assert one.name.startswith("scale_")
    assert len(one.name.removeprefix("scale_")) == 12


def test_the_kernel_is_chosen_by_the_rows_at_run_time() -> None:
    calls: list[int] = []

    def kernel(bucket: int):
        def run(x: torch.Tensor) -> tuple[torch.Tensor]:
            calls.append(bucket)
            return double_plus_one(x)

        return run

    op = swap.operator(PROBLEM, {1: ("rows1", kernel(1)), 4: ("rows4", kernel(4))})
    for rows in (1, 3, 4, 2, 9):
        x = torch.randn(rows, 64)
        assert torch.equal(op.call(x), x * 2 + 1)
    assert calls == [1, 4, 4]
    assert swap.fallbacks == {op.name: 2}, "2 and 9 rows have no kernel: the subgraph ran, and was counted"


def test_the_identity_swap_is_no_fallback() -> None:
    op = swap.operator(PROBLEM, {})
    op.call(torch.randn(2, 64))
    assert swap.fallbacks == {}


def test_outputs_never_alias_and_are_contiguous() -> None:
    same = Problem("same", "def reference(x):\n    return (x,)\n", PROBLEM.inputs, PROBLEM.outputs)
    op = swap.operator(same, {})
    for x in (torch.randn(3, 64), torch.randn(64, 3).t()):
        y = op.call(x)
        assert torch.equal(x, y)
        assert y.is_contiguous()
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_inputs_reach_a_kernel_as_it_was_verified() -> None:
    seen: list[tuple[bool, bool]] = []

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append((x.is_contiguous(), x.data_ptr() % 16 == 0))
        return double_plus_one(x)

    op = swap.operator(PROBLEM, {4: ("checks its input", kernel)})
    base = torch.randn(4 * 64 + 1)
    for x in (torch.randn(64, 4).t(), base[1:].view(4, 64), torch.randn(4, 64)):
        assert torch.equal(op.call(x), x * 2 + 1)
    assert seen == [(True, True)] * 3


@pytest.mark.parametrize("name", ["identity", "kernel"])
def test_opcheck(name: str) -> None:
    op = swap.operator(PROBLEM, {} if name == "identity" else {4: ("opcheck", double_plus_one)})
    torch.library.opcheck(op.call, (torch.randn(4, 64),))
    torch.library.opcheck(op.call, (torch.randn(64, 4).t(),))


def test_a_wrong_kernel_does_not_agree() -> None:
    right = swap.operator(PROBLEM, {4: ("right", double_plus_one)})
    wrong = swap.operator(PROBLEM, {4: ("wrong", lambda x: (x * 2.002 + 1,))})
    assert swap.agrees(right, {"r0": 4}, "cpu") is None
    assert "float64" in str(swap.agrees(wrong, {"r0": 4}, "cpu"))


def swapped(model: torch.nn.Module, *args: torch.Tensor, dynamic: bool | None = None) -> fx.GraphModule:
    with torch.no_grad():
        (gm,) = graphs(model, *args, dynamic=dynamic)
    found, _ = trace.sites(gm.graph)
    swap.apply(gm.graph, [(s, swap.operator(s.problem, {})) for s in found])
    gm.recompile()
    return gm


def test_apply_rewrites_every_site_and_computes_the_same() -> None:
    layer = Layer()
    a, b = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    gm = swapped(layer, a, b)
    ops = [n for n in gm.graph.nodes if n.op == "call_function" and "jasperk" in str(n.target)]
    assert len(ops) == 4
    assert not [n for n in gm.graph.nodes if n.target is torch.nn.functional.linear]
    with torch.no_grad():
        inputs = [
            {"l_x_": a, "l_y_": b}.get(n.name, dict(layer.named_parameters()).get(_parameter(n.name)))
            for n in gm.graph.nodes
            if n.op == "placeholder"
        ]
        assert torch.equal(gm(*inputs)[0], layer(a, b))


def _parameter(name: str) -> str:
    return name.removeprefix("l_self_").replace("modules_", "").replace("parameters_", "").rstrip("_").replace("_", ".")


def test_new_nodes_carry_what_dynamo_recorded() -> None:
    gm = swapped(Layer(), torch.randn(2, 3, 64), torch.randn(2, 3, 64))
    for node in gm.graph.nodes:
        if "jasperk" in str(node.target):
            assert "nn_module_stack" in node.meta
    getitems = [n for n in gm.graph.nodes if getattr(n.target, "__name__", "") == "getitem"]
    assert all("example_value" in n.meta for n in getitems)


def test_the_fake_gives_shapes_for_symbolic_sizes() -> None:
    op = swap.operator(PROBLEM, {})
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(torch.randn(5, 64))
        y = op.call(x)
    assert y.shape == x.shape
    assert y.stride() == (64, 1)


def test_random_inputs_leave_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    swap.random_inputs(PROBLEM, {"r0": 4}, "cpu")
    assert torch.equal(torch.randn(3), expected)


def test_references_are_loaded_once() -> None:
    assert reference.load(PROBLEM.reference) is reference.load(PROBLEM.reference)


@pytest.mark.parametrize("which", [(0, 1, 2, 3), (0,), (1,), (0, 2), (1, 2)])
def test_sites_that_share_a_sum_may_be_swapped_one_without_the_other(which: tuple[int, ...]) -> None:
    from test_trace import Stack

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        pairs = [s for s in trace.sites(gm.graph)[0] if s.family == "residual_rmsnorm"]
        swap.apply(gm.graph, [(pairs[i], swap.operator(pairs[i].problem, {})) for i in which])
        gm.recompile()
        return gm.forward

    model, args = Stack(), (torch.randn(2, 3, 64), torch.randn(2, 3, 64))
    with torch.no_grad():
        for got, wanted in zip(torch.compile(model, backend=backend)(*args), model(*args), strict=True):
            assert torch.allclose(got, wanted, atol=1e-5)
