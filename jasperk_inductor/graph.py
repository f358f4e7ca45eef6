"""A Dynamo graph, seen as dataflow.

Dynamo's graph still speaks the user's dialect: `x + y`, `torch.add(x, y)` and `x.add(y)` are three different nodes, a cast may
be `.float()`, `.to(...)` or `.type_as(...)`. `GraphView` gives every node one canonical name, so that families look at what is
computed and not at how it was spelt; it knows which tensors share storage and which nodes write, so that a site is only moved
where nothing changes under it.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_FUNCTIONS: dict[Any, str] = {}


def _name(canonical: str, *functions: Any) -> None:
    for function in functions:
        _FUNCTIONS[function] = canonical


_name("add", operator.add, torch.add)
_name("sub", operator.sub, torch.sub)
_name("mul", operator.mul, torch.mul, torch.multiply)
_name("div", operator.truediv, torch.div, torch.true_divide)
_name("neg", operator.neg, torch.neg, torch.negative)
_name("pow", operator.pow, torch.pow)
_name("square", torch.square)
_name("mean", torch.mean)
_name("rsqrt", torch.rsqrt)
_name("sqrt", torch.sqrt)
_name("cat", torch.cat, torch.concat, torch.concatenate)
_name("getitem", operator.getitem)
_name("silu", F.silu)
_name("sigmoid", torch.sigmoid, F.sigmoid, torch.special.expit)
_name("softmax", F.softmax, torch.softmax)
_name("softplus", F.softplus)
_name("linear", F.linear)
_name("conv1d", F.conv1d, torch.conv1d)
_name("attention", F.scaled_dot_product_attention)
_name("rms_norm", F.rms_norm, *([torch.rms_norm] if hasattr(torch, "rms_norm") else []))
_name("dropout", F.dropout, torch.dropout)
_name("view", torch.reshape, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze, torch.flatten, torch.unflatten)
_name("view", torch.swapaxes, torch.movedim)
_name("chunk", torch.chunk, torch.split, torch.tensor_split)

_METHODS = {name: name for name in ("add", "sub", "mul", "div", "neg", "pow", "square", "mean", "rsqrt", "sqrt", "sigmoid", "softmax")}
_METHODS |= dict.fromkeys(("view", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "expand", "contiguous", "flatten", "unflatten", "view_as", "reshape_as", "expand_as", "swapaxes", "movedim"), "view")  # fmt: skip
_METHODS |= {"chunk": "chunk", "split": "chunk", "tensor_split": "chunk", "true_divide": "div", "multiply": "mul"}
_CASTS = {"float", "half", "bfloat16", "double", "type", "type_as", "to"}

# Nothing may be moved across these: they change what the nodes after them mean.
_BARRIERS = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode"}


_TRANSFORMS = {"_enter_dual_level", "_make_dual", "_unwrap_for_grad", "_wrap_for_grad", "_add_batch_dim"}


def value_of(node: fx.Node) -> Any:
    """What Dynamo recorded for a node: a fake tensor, a SymInt, …, or None."""
    return node.meta.get("example_value", node.meta.get("val"))


def arguments(node: fx.Node) -> list[Any]:
    """A node's positional arguments."""
    return list(node.args)


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value_of(node), torch.Tensor)


def canonical(node: fx.Node) -> str:
    """One name for one operation, whatever its spelling; "" where the operation is not one we know, or is given by keywords what is
    otherwise given by position."""
    name = _canonical(node)
    return name if len(node.args) >= (2 if name in ("pow", "mul", "getitem") else 1) else ""


def _canonical(node: fx.Node) -> str:
    if node.op == "call_function":
        if (name := _FUNCTIONS.get(node.target)) is not None:
            return name
        text = str(getattr(node.target, "__name__", node.target))
        return "attention" if "attention" in text else ""  # flex_attention and other attention operators
    if node.op == "call_method":
        if node.target in _CASTS:
            source, value = value_of(arguments(node)[0]), value_of(node)
            same = isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor) and source.device == value.device
            return "cast" if same else ""
        return _METHODS.get(str(node.target), "")
    return ""


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool | torch.Size)


SHARED = "jasperk_shared_memory"  # a placeholder's group, where its memory overlaps that of other inputs


def mark_shared_memory(graph: fx.Graph, inputs: Sequence[Any]) -> None:
    """Notes which graph inputs lie in the same memory although their storages are different objects (`torch.from_numpy` twice)."""
    ranges = []
    for node, value in zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=False):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # sparse and wrapper tensors have no memory to compare
            if isinstance(value, torch.Tensor) and value.device.type != "meta" and (size := value.untyped_storage().nbytes()):
                ranges.append((value.device.index or 0, value.untyped_storage().data_ptr(), size, node))
    ranges.sort(key=lambda r: r[:2])
    end, group, first = (-1, 0), 0, None
    for index, start, size, node in ranges:
        if first is not None and index == end[0] and start < end[1]:
            first.meta[SHARED] = node.meta[SHARED] = group
            end = (index, max(end[1], start + size))
        else:
            group, first, end = group - 1, node, (index, start + size)


def storages(value: Any) -> set[int]:
    """Identities of the storages behind a value (tensor, or nest of them)."""
    if isinstance(value, torch.Tensor):
        try:
            return {value.untyped_storage()._cdata}
        except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none; they never match a site
            return set()
    if isinstance(value, list | tuple):
        return set().union(*(storages(v) for v in value))
    return set()


def written(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose tensors this node may write in place. What is not known to leave its inputs alone counts as a writer of all."""
    if node.op == "call_method":
        name = str(node.target)
        if (name.endswith("_") and not name.endswith("__")) or name in _WRITING_METHODS:
            yield from _nodes(node.args[:1])
    elif node.op == "call_module":
        yield from node.all_input_nodes
    elif node.op == "call_function":
        yield from _nodes([node.kwargs.get("out")])
        yield from _written_by_function(node)


def _written_by_function(node: fx.Node) -> Iterator[fx.Node]:
    target: Any = node.target
    name = str(getattr(target, "__name__", target))
    if isinstance(target, torch._ops.OpOverload):
        yield from _written_by_schema(target._schema, node)
    elif isinstance(target, torch._ops.OpOverloadPacket):
        for overload in target.overloads():
            yield from _written_by_schema(getattr(target, overload)._schema, node)
    elif target in _INPLACE or (name.endswith("_") and not name.endswith("__")):
        yield from _nodes(node.args[:1] or list(node.kwargs.values())[:1])
    elif _is_inplace(target, node):
        yield from _nodes(node.args[:1] or [node.kwargs.get("input")])
    elif isinstance(target, torch._ops.HigherOrderOperator) or not _is_known(target):
        yield from node.all_input_nodes  # opaque: may write anything it is given


def _written_by_schema(schema: Any, node: fx.Node) -> Iterator[fx.Node]:
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _nodes([node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)])


def _nodes(values: Iterable[Any]) -> Iterator[fx.Node]:
    """The nodes among some arguments, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, fx.Node):
            yield value
        elif isinstance(value, list | tuple):
            yield from _nodes(value)


def _is_inplace(target: Any, node: fx.Node) -> bool:
    """Whether a function is called with `inplace=True`, by name or by position."""
    if True not in (*node.args, *node.kwargs.values()):
        return False
    try:
        bound = inspect.signature(target).bind_partial(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # a builtin without a signature
        return node.kwargs.get("inplace") is True
    return bound.arguments.get("inplace") is True


def _is_known(target: Any) -> bool:
    """Functions of torch, of operator and of Python: those of them that write say so by their names."""
    module = getattr(target, "__module__", None) or getattr(getattr(target, "__objclass__", None), "__module__", None) or ""
    return module.split(".")[0] in ("", "torch", "operator", "_operator", "builtins", "math", "functools")


_INPLACE_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift", "concat")
_INPLACE = {operator.setitem, operator.delitem} | {getattr(operator, f"i{name}") for name in _INPLACE_NAMES}
_WRITING_METHODS = {"__setitem__", "__delitem__"} | {f"__i{name}__" for name in _INPLACE_NAMES}


class GraphView:
    """Read-only helpers over one graph. Node order is computed once; do not edit the graph while a view is in use."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self._names = {node: canonical(node) for node in self.nodes}
        self._same = {s: node.meta[SHARED] for node in self.nodes if SHARED in node.meta for s in storages(value_of(node))}
        self._writes: list[tuple[int, set[int]]] = []  # position, storages written
        self._barriers: list[int] = []
        self.transformed = ""  # the first sign of a function transform (vmap, grad, jvp), which runs its operators by other rules
        for i, node in enumerate(self.nodes):
            name = str(getattr(node.target, "__name__", node.target))
            if name in _BARRIERS:
                self._barriers.append(i)
            if name in _TRANSFORMS or name.endswith("_increment_nesting"):
                self.transformed = self.transformed or name
            if targets := list(written(node)):
                self._writes.append((i, set().union(*(self.storages(value_of(t)) for t in targets))))

    def storages(self, value: Any) -> set[int]:
        """As the function of that name, with graph inputs that lie in the same memory taken together."""
        return {self._same.get(s, s) for s in storages(value)}

    def name(self, node: Any) -> str:
        """The canonical name of a node; "" for anything else."""
        return self._names.get(node, "") if isinstance(node, fx.Node) else ""

    def all(self, *names: str) -> Iterator[fx.Node]:
        """All nodes of these canonical names, in graph order."""
        return (node for node in self.nodes if self._names[node] in names)

    def users(self, node: fx.Node, *names: str) -> list[fx.Node]:
        """Users of a node, all of them or those of these canonical names, in graph order."""
        found = [u for u in node.users if not names or self._names[u] in names]
        return sorted(found, key=self.position.__getitem__)

    def up(self, node: Any, *names: str) -> Any:
        """Follows first arguments backwards while nodes have one of these names; e.g. up(x, "cast") strips casts."""
        while isinstance(node, fx.Node) and self._names.get(node) in names:
            node = node.args[0]
        return node

    def down(self, node: fx.Node, *names: str) -> fx.Node:
        """Follows sole users forwards while they have one of these names (and use the node as their first argument)."""
        while True:
            onward = [u for u in node.users if self._names[u] in names and u.args and u.args[0] is node]
            if len(node.users) != 1 or not onward:
                return node
            node = onward[0]

    def operands(self, node: fx.Node) -> tuple[Any, Any]:
        """Both operands of a binary node (an absent one is None)."""
        args = [*node.args, None, None]
        return args[0], args[1] if len(node.args) > 1 else node.kwargs.get("other")

    def reach(self, start: Iterable[fx.Node], stop: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], list[fx.Node]]:
        """Everything that is computed from the tensors of `start`, not going beyond nodes where `stop` holds: (nodes between, nodes
        stopped at). What depends on a tensor's sizes only is not computed from it."""
        seen: set[fx.Node] = set()
        ends: dict[fx.Node, None] = {}
        todo = list(start)
        while todo:
            for user in todo.pop().users:
                if stop(user):
                    ends[user] = None
                elif user not in seen and not _is_size(value_of(user)):
                    seen.add(user)
                    todo.append(user)
        return seen, sorted(ends, key=self.position.__getitem__)

    def between(self, inputs: Iterable[fx.Node], outputs: Iterable[fx.Node]) -> list[fx.Node] | fx.Node:
        """The nodes that compute `outputs` from `inputs`, in graph order; or, instead, a leaf that is no input."""
        stop, seen, todo = set(inputs), set(), list(outputs)
        while todo:
            node = todo.pop()
            if node in seen or node in stop:
                continue
            if node.op in ("placeholder", "get_attr", "output"):
                return node
            seen.add(node)
            todo.extend(node.all_input_nodes)
        return sorted(seen, key=self.position.__getitem__)

    def place(
        self, nodes: list[fx.Node], inputs: Iterable[fx.Node], outputs: Iterable[fx.Node], recomputed: Iterable[fx.Node] = ()
    ) -> fx.Node | str:
        """The node before which one call may replace `nodes`; or, instead, why there is no such place. Nodes that are `recomputed`
        stay in the graph for their other users."""
        inside, position = set(nodes), self.position
        leaks = [n for n in nodes if n not in {*outputs, *recomputed} and any(u not in inside for u in n.users)]
        if leaks:
            return f"an intermediate value ({leaks[0].name}) is also used elsewhere"
        ready = max((position[i] for i in inputs), default=-1) + 1
        first, last = position[nodes[0]], position[nodes[-1]]
        uses = [position[u] for o in outputs for u in o.users if u not in inside]
        needed = min(uses, default=last + 1)
        if ready > needed:
            return "an input is ready only after an output is first used"
        at = min(max(ready, first), needed)
        low, high = min(at, first), max(at, last)
        if any(low <= b <= high for b in self._barriers):
            return "it spans a change of grad mode or autocast"
        sources = set().union(*(self.storages(value_of(n)) for n in inputs))
        if any(self.storages(value_of(o)) & sources for o in outputs):
            return "an output is a view of an input"
        touched = set().union(*(self.storages(value_of(n)) for n in [*inputs, *nodes]))
        for i, targets in self._writes:
            if low <= i <= high and (targets & touched or self.nodes[i] in inside):
                return f"an in-place write ({self.nodes[i].name}) falls among its nodes"
        return self.nodes[at]


def module_path(node: fx.Node) -> str:
    """The path of the innermost module a node was traced in, e.g. "model.layers.3.mlp.down_proj"."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    for prefix in ("L['args'][0]", "L['self']", "L['fn']"):
        path = path.removeprefix(prefix)
    return path.lstrip(".")
