"""The nouns that travel between the stages.

A `Site` is a place in one traced graph; its `Problem` is what must be computed there, freed from the place: the reference is
the user's own subgraph as source text, so nobody has to model `(1 + w)` or an eps by hand. An optimizer answers with a
`Candidate`, the evaluator with a `Verdict`, and the cache keeps both as an `Entry` with the record of where it holds. In the
end every site is `Swapped` or `Kept` for a reason. All of them are frozen; what goes to disk is plain JSON and comes back
through a validating parser, so a damaged file is an error and not a surprise.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import fx

    from .graph import GraphView

T = TypeVar("T")
Scalar = bool | int | float | str
Dim = int | str  # a str names a symbolic size, e.g. "r0" (rows): the kernel must take any value of it
Sizes = Mapping[str, int]  # symbolic size -> value


def digest(value: Any) -> str:
    """SHA-256 of a JSON-able value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def bucket(rows: int) -> int:
    """The smallest power of two >= rows (>= 1): kernels are chosen and verified per bucket of rows (M)."""
    return 1 << max(0, rows - 1).bit_length()


# ------------------------------------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a Problem.

    Attributes:
        role: its name in the kernel's signature, e.g. "x", "weight", "residual".
        dims: sizes; a str is symbolic.
        dtype: torch's name without the prefix, e.g. "bfloat16".
        layout: "contiguous"; "pitched:P" (unit last stride, rows P elements apart, else packed: a slice of a wider
            tensor); "strided" (unit last stride, anything else); "scattered" (last stride is not 1).
        align: bytes that the data pointer is a multiple of, at most 16.
        kind: "activation" (fresh at every call), "matrix" or "vector" (parameters), which says how to draw test values
            and what changes between timed calls.
    """

    role: str
    dims: tuple[Dim, ...]
    dtype: str
    layout: str = "contiguous"
    align: int = 16
    kind: str = "activation"

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[d] if isinstance(d, str) else d for d in self.dims)

    @property
    def fixed(self) -> tuple[int, ...]:
        """The sizes that are not symbolic, in order."""
        return tuple(d for d in self.dims if isinstance(d, int))

    def nbytes(self, sizes: Sizes) -> int:
        return math.prod(self.shape(sizes)) * _ITEMSIZE[self.dtype]


_ITEMSIZE = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Tolerance:
    """What "correct" means; all of it together.

    Attributes:
        atol, rtol: an element is right if |out - ref| <= atol + rtol * |ref|.
        within: the share of elements of every floating output that must be right.
        l1, l2: the most relative global error, sum|out - ref| / sum|ref| and ||out - ref|| / ||ref||.
        fp64_factor: error against an fp64 run of the reference at most this many times the larger of eager's and
            Inductor's own (plus one rounding of the output); None: not asked (benchmarks).
    """

    atol: float = 1e-2
    rtol: float = 1e-2
    within: float = 0.99
    l1: float = 1e-2
    l2: float = 1e-2
    fp64_factor: float | None = 2.0


@dataclass(frozen=True)
class Problem:
    """What must be computed, independent of where.

    Attributes:
        family: name of the operator family, or of a benchmark task.
        reference: Python source that defines `reference(<roles>)`, written from the user's own subgraph.
        inputs, outputs: in the order of the kernel's signature.
        params: constants that a kernel needs and the reference has as literals, e.g. ("eps", 1e-6).
        mutated: roles that the kernel may change in place (a cache or recurrent state); all others must stay as they are.
    """

    family: str
    reference: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    params: tuple[tuple[str, Scalar], ...] = ()
    mutated: tuple[str, ...] = ()
    tolerance: Tolerance = Tolerance()

    @functools.cached_property
    def hash(self) -> str:
        return digest(to_json(self))

    @functools.cached_property
    def symbols(self) -> tuple[str, ...]:
        """Symbolic sizes in order of first use."""
        return tuple(dict.fromkeys(d for t in self.inputs for d in t.dims if isinstance(d, str)))

    @functools.cached_property
    def spec(self) -> Spec:
        return Spec(self.family, self.inputs, self.outputs, self.params, self.mutated)

    def rows(self, sizes: Sizes) -> int:
        """M: the product of the symbolic sizes."""
        return math.prod(sizes[s] for s in self.symbols)

    def nbytes(self, sizes: Sizes) -> int:
        """The fewest bytes that must move: every input read once, every output written once."""
        return sum(t.nbytes(sizes) for t in self.inputs + self.outputs)


@dataclass(frozen=True)
class Spec:
    """A Problem without its answer: all that a candidate may know."""

    family: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    params: tuple[tuple[str, Scalar], ...] = ()
    mutated: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------- candidates and verdicts


@dataclass(frozen=True)
class Candidate:
    """A proposed kernel: source text, its language, launch parameters, and where it came from.

    `origin` is free text for people ("library", "library:tuned", "llm 3.2" for trajectory 3 turn 2); it is not hashed.
    """

    language: str
    source: str
    params: tuple[tuple[str, Scalar], ...] = ()
    origin: str = "library"

    @functools.cached_property
    def hash(self) -> str:
        return digest([self.language, self.source, self.params])

    def describe(self) -> str:
        shown = ", ".join(f"{k}={v}" for k, v in self.params)
        return f"{self.language}({shown})"


class Status(enum.StrEnum):
    """One value per way to fail; only PASSED may enter a cache."""

    PASSED = "passed"
    NO_CUSTOM_KERNEL = "no_custom_kernel"  # the static screen: library calls only, or a forbidden construct
    FORBIDDEN = "forbidden"  # the static screen: reaches for the harness, files, processes, …
    BUILD_FAILED = "build_failed"
    BUILD_TIMEOUT = "build_timeout"
    CRASHED = "crashed"  # a signal, an illegal access, an abort
    RAISED = "raised"  # a Python exception in the candidate
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    PROTOCOL = "protocol"  # left, or wrote something else, before the protocol was over
    WRONG_STRUCTURE = "wrong_structure"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    WRONG_STRIDES = "wrong_strides"
    NOT_FINITE = "not_finite"
    MISMATCH = "mismatch"  # too few elements within tolerance, or the L1 or L2 error too large
    LESS_ACCURATE = "less_accurate"  # further from fp64 than the stated factor of eager's and Inductor's own error
    INPUT_CHANGED = "input_changed"
    OUTPUT_ALIASED = "output_aliased"
    STALE_OUTPUT = "stale_output"  # a timed call's output was wrong
    STATE_CHANGED = "state_changed"  # numeric flags, default dtype, environment, … changed by the candidate
    TIMING_UNBOUNDED = "timing_unbounded"  # reported device times that the judge's own clock contradicts
    IMPOSSIBLE_TIME = "impossible_time"  # faster than the hardware can move the bytes
    INFRASTRUCTURE = "infrastructure"  # not the candidate's fault; may be tried again


@dataclass(frozen=True)
class Accuracy:
    """The worst over all trials and outputs."""

    within: float  # share of elements inside atol + rtol * |ref|
    l1: float
    l2: float
    max_abs: float
    fp64: float | None = None  # ||out - ref64|| / ||ref64||
    eager_fp64: float | None = None
    inductor_fp64: float | None = None


@dataclass(frozen=True)
class Latency:
    """Interleaved samples in milliseconds a call, the same clock on all sides.

    `clock` is "graph" (CUDA-graph replay: swap decisions), "wall" (synchronised wall time a call: benchmark scores, and
    everything on a CPU).
    """

    clock: str
    candidate: tuple[float, ...]
    eager: tuple[float, ...]
    inductor: tuple[float, ...] = ()

    def baseline(self, beat: str) -> tuple[float, ...]:
        return self.inductor if beat == "inductor" and self.inductor else self.eager


@dataclass(frozen=True)
class Profile:
    """What ran, compactly."""

    launches: int = 0
    kernels: tuple[tuple[str, float], ...] = ()  # name, share of device time
    busy: float | None = None  # device time over wall time


@dataclass(frozen=True)
class Verdict:
    """The evaluator's answer. `latency` is None unless PASSED."""

    status: Status
    message: str = ""
    accuracy: Accuracy | None = None
    latency: Latency | None = None
    profile: Profile | None = None
    sizes: tuple[tuple[str, int], ...] = ()  # where it was timed
    seconds: float = 0.0  # that the evaluation took, without queueing

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED


@dataclass(frozen=True)
class Validity:
    """Where a Verdict holds. An Entry is served only where all of `binding()` agrees."""

    device: str
    capability: str
    units: int  # SMs, or CPU threads
    torch: str
    triton: str
    cuda: str
    driver: str
    evaluator: str

    _BINDING = ("device", "capability", "units", "torch", "triton", "cuda", "evaluator")

    def binding(self) -> list[Any]:
        """All that must agree. The driver does not bind."""
        return [getattr(self, name) for name in self._BINDING]

    def mismatch(self, here: Validity) -> str | None:
        """The first factor that differs here, in words; None if the entry holds."""
        for name in self._BINDING:
            there, now = getattr(self, name), getattr(here, name)
            if there != now:
                return f"{name}: built for {there!r}, here {now!r}"
        return None


@dataclass(frozen=True)
class Entry:
    """A verified kernel: what the cache keeps and the backend serves.

    Attributes:
        artifact: files of the built kernel, relative path -> SHA-256 of the blob.
    """

    problem: Problem
    bucket: int
    candidate: Candidate
    verdict: Verdict
    validity: Validity
    artifact: tuple[tuple[str, str], ...] = ()

    @functools.cached_property
    def hash(self) -> str:
        return digest([self.problem.hash, self.bucket, self.candidate.hash, list(self.artifact)])


@dataclass(frozen=True)
class Attempt:
    """A search that ended without a kernel: kept so that a second compile does not repeat it."""

    problem_hash: str
    bucket: int
    validity: Validity
    fingerprint: str  # of the optimizer and the sources it tried
    reason: str


# ----------------------------------------------------------------------------------------------------- families and sites


@dataclass(frozen=True)
class Match:
    """What a family's `find` returns: one occurrence in one graph.

    Attributes:
        inputs: role -> the node outside the site that feeds it.
        outputs: role -> node; every use of a site's node from outside must be one of these.
        dims: role -> sizes, for inputs and outputs; leading sizes that vary between calls by name, the others as None
            (filled in from the graph).
        kinds: role -> "matrix" or "vector" for parameters; others are activations.
        params: constants that kernels need; a node stands for its value.
        constants: nodes folded to a literal (an eps that arrives as a graph input under dynamic=True).
        recomputed: cheap nodes that the site computes for itself and leaves in the graph for whoever else uses them.
    """

    inputs: Mapping[str, fx.Node]
    outputs: Mapping[str, fx.Node]
    dims: Mapping[str, tuple[str | None, ...]]
    kinds: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Scalar | fx.Node] = field(default_factory=dict)
    constants: tuple[fx.Node, ...] = ()
    recomputed: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Family:
    """An operator family: how it is found and what is known about it. One per folder of `kernels/`.

    Attributes:
        name: semantic name, e.g. "ffn_down". A model card maps it to its letter.
        title: a few words for people.
        find: all occurrences in a graph.
        flops: floating-point operations of a Problem at given sizes.
        space: language -> launch parameters to try, best guess first; a function of (Spec, rows).
        draw: (spec of one input, sizes, generator, style) -> tensor, for inputs that plain random values do not fit; None
            for the default, also for a single input.
        devices: kinds of device on which it is looked for.
    """

    name: str
    title: str
    find: Callable[[GraphView], list[Match]]
    flops: Callable[[Problem, Sizes], float]
    space: Mapping[str, Callable[[Spec, int], list[dict[str, Scalar]]]]
    tolerance: Tolerance = Tolerance()
    draw: Callable[[TensorSpec, Sizes, torch.Generator, str], torch.Tensor | None] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda", "meta")


@dataclass(frozen=True, eq=False)
class Site:
    """One place in one traced graph, with its Problem.

    Attributes:
        module: path of the module it was traced in, e.g. "model.layers.3.mlp.down_proj"; "" if there is none.
        sizes: the value of every symbolic size when it was traced.
        dynamic: whether some of them vary between calls of this graph.
        nodes: all nodes that the swap replaces, in graph order.
    """

    module: str
    problem: Problem
    sizes: Sizes
    dynamic: bool
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    before: fx.Node  # where the fused call goes: all inputs are ready, no output has been used

    @property
    def family(self) -> str:
        return self.problem.family

    @property
    def rows(self) -> int:
        return self.problem.rows(self.sizes)


@dataclass(frozen=True)
class Swapped:
    """A site that runs a verified kernel."""

    family: str
    module: str
    rows: int
    kernel: str  # Candidate.describe()
    op: str
    gain: float | None = None  # baseline over kernel, the clock and baseline of the policy
    roofline: float | None = None  # share of the device's bandwidth or FLOP limit, whichever binds
    ms: float | None = None  # the kernel alone
    inductor_ms: float | None = None  # what Inductor would run there, alone

    status = "swapped"


@dataclass(frozen=True)
class Kept:
    """A site that stays as it was, and why."""

    family: str
    module: str
    rows: int
    reason: str
    kernel: str = ""  # the best verified kernel, if there is one that was not used
    gain: float | None = None

    status = "kept"


Outcome = Swapped | Kept


# ------------------------------------------------------------------------------------------------------------------ JSON


_adapters: dict[Any, Any] = {}


def _adapter(kind: Any) -> Any:
    if kind not in _adapters:
        from pydantic import TypeAdapter  # 60 ms, and only the lab and a cache hit need it

        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def to_json(value: Any) -> Any:
    """A noun as plain JSON data."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_json(kind: type[T], data: Any) -> T:
    """Reads a noun back from JSON data (or text), checking every field.

    Raises:
        ValueError: the data is not of that kind (pydantic's ValidationError is one).
    """
    adapter = _adapter(kind)
    if isinstance(data, str | bytes):
        return adapter.validate_json(data)
    return adapter.validate_json(json.dumps(data))
