from __future__ import annotations

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
