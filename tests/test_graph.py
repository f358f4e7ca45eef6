from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import MLP, graphs

from jasperk_inductor.graph import GraphView, module_path


def view(function, *args, **kwargs) -> GraphView:
    with torch.no_grad():
        (gm,) = graphs(function, *args, **kwargs)
    return GraphView(gm.graph)


def test_one_name_for_every_spelling() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) + torch.add(x, y) + x.add(y)

    assert len(list(view(f, torch.ones(3), torch.ones(3)).all("add"))) == 5


def test_casts_are_casts_only_within_a_device() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.float() + x.to(torch.float32) + x.type_as(y) + x.to(y)

    assert len(list(view(f, torch.ones(3, dtype=torch.bfloat16), torch.ones(3)).all("cast"))) == 4


def test_in_place_writes_are_seen_in_every_spelling() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = x + 1, x + 2, x + 3, x + 4
        a.add_(1)
        b[0] = 1.0
        torch.add(c, 1, out=c)
        d += 1
        F.relu(a, inplace=True)
        torch.relu_(b)
        return a + b + c + d

    writes = view(f, torch.ones(4))._writes
    assert len(writes) >= 6


def test_a_place_is_refused_where_something_is_written_in_between() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x + y
        y.mul_(2)  # an input of the site changes between its first and last node
        return h * y

    one = view(f, torch.ones(4), torch.ones(4))
    total, product = next(one.all("add")), next(n for n in one.nodes if n.name.startswith("mul") and n.op == "call_function")
    nodes = one.between(total.all_input_nodes, [product])
    assert isinstance(nodes, list)
    refused = one.place(nodes, total.all_input_nodes, [product])
    assert "in-place write" in str(refused)


def test_a_place_is_refused_for_a_leaking_intermediate() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x * 2
        return h.sigmoid(), h

    one = view(f, torch.ones(4))
    h, s = next(one.all("mul")), next(one.all("sigmoid"))
    assert "also used elsewhere" in str(one.place([h, s], h.all_input_nodes, [s]))


def test_a_place_is_refused_for_a_view_of_an_input() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(4, 1).transpose(0, 1) + 0

    one = view(f, torch.ones(4))
    shaped, turned = list(one.all("view"))
    assert "view of an input" in str(one.place([shaped, turned], shaped.all_input_nodes, [turned]))


def test_module_paths() -> None:
    one = view(MLP(), torch.ones(2, 64))
    assert [module_path(n) for n in one.all("linear")] == ["gate", "up", "down"]


def ffn(between: Any) -> Any:
    """Two siblings with something between them: what that writes must be seen."""

    def run(x: torch.Tensor, g: torch.Tensor, u: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        a = F.linear(x, g)
        between(x)
        return F.linear(F.silu(a) * F.linear(x, u), d)

    return run


@torch.library.custom_op("jasperk_tests::bump", mutates_args={"x"})
def bump(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("jasperk_tests::bump_all", mutates_args={"xs"})
def bump_all(xs: list[torch.Tensor]) -> None:
    for x in xs:
        x.add_(1)


WRITES = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1, True),
    "elu": lambda x: F.elu(x, inplace=True),
    "relu6": lambda x: F.relu6(x, True),
    "hardtanh": lambda x: F.hardtanh(x, -1.0, 1.0, True),
    "dropout": lambda x: F.dropout(x, 0.5, True, True),
    "silu": lambda x: F.silu(x, inplace=True),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "custom": lambda x: bump(x),
    "custom by name": lambda x: bump(x=x),
    "custom packet": lambda x: torch.ops.jasperk_tests.bump(x),
    "custom list": lambda x: bump_all([x]),
    "ipow": lambda x: x.__ipow__(2),
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "out": lambda x: torch.mul(x, 2.0, out=x),
    "add_": lambda x: x.add_(1),
    "view then write": lambda x: x.view(-1)[:3].zero_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_between_siblings_is_seen(name: str) -> None:
    from jasperk_inductor import backend

    torch.manual_seed(0)
    args = [torch.randn(6, 16), torch.randn(32, 16), torch.randn(32, 16), torch.randn(16, 32)]
    run = ffn(WRITES[name])
    fn = torch.compile(run, backend=lambda gm, x: backend.jasperk(gm, x, options={"identity": True, "strict": True}))
    with torch.no_grad():
        torch.manual_seed(1)
        wanted = run(*args)
        torch.manual_seed(1)
        got = fn(*args)
    if name != "dropout":  # whose random numbers are Inductor's own
        assert torch.allclose(got, wanted, atol=1e-3), name
    from jasperk_inductor import explanation

    outcomes = {o.family: o.status for g in explanation.reports() for o in g.outcomes}
    assert outcomes.get("ffn_gate_up") == "kept", outcomes


def test_two_inputs_in_the_same_memory() -> None:
    from jasperk_inductor import backend

    def run(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor, u: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        a = F.linear(x, g)
        y.add_(1)
        return F.linear(F.silu(a) * F.linear(x, u), d)

    from jasperk_inductor import explanation

    weights = [torch.randn(32, 16), torch.randn(32, 16), torch.randn(16, 32)]
    fn = torch.compile(run, backend=lambda gm, x: backend.jasperk(gm, x, options={"identity": True, "strict": True}))
    for shared, status in ((True, "kept"), (False, "swapped")):
        torch._dynamo.reset()
        explanation.forget()
        x = torch.randn(4, 16)
        with torch.no_grad():
            fn(x, torch.from_numpy(x.numpy()) if shared else x.clone(), *weights)
        (report,) = explanation.reports()
        assert {o.family: o.status for o in report.outcomes}["ffn_gate_up"] == status
