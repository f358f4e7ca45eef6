"""The calling convention of compiled kernels (C++ and CUDA C++): one C function, no torch headers.

A source defines

    extern "C" int jasperk_run(void* const* data, const int64_t* meta, const double* params, void* stream);

`data` holds the pointers of the inputs and then the outputs, in the order of the Spec; `meta` 16 numbers a tensor, 8 sizes and
8 strides (in elements); `params` the Spec's constants; `stream` the CUDA stream (null on a CPU). It returns 0, or an error code
that is shown. The last stride of every tensor is 1. A generated prelude names all of that, so that a source says
`JK_DATA(x)`, `JK_SIZE(x, 0)`, `jk::x_t`, `JK_PARAM_eps`. Without torch headers a kernel builds in about a second, and its
binary works under any torch version.
"""

from __future__ import annotations

import ctypes
import re
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..contract import Candidate, Scalar, Spec
from .base import Kernel

META = 16  # numbers a tensor: 8 sizes, then 8 strides

_TYPES = {"float32": "float", "bfloat16": "jk_bf16", "float16": "jk_f16", "int32": "int32_t", "int64": "int64_t"}

_HOST_TYPES = """\
struct jk_bf16 { uint16_t bits; };
struct jk_f16 { _Float16 value; };
"""
_CUDA_TYPES = """\
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using jk_bf16 = __nv_bfloat16;
using jk_f16 = __half;
"""


def prelude(spec: Spec, params: Iterable[tuple[str, Scalar]], *, cuda: bool) -> str:
    """The generated head of a source: types, argument indices and launch parameters. Sizes stay run-time values, so the
    text (and the binary) is shared by all Problems that agree in roles and types."""
    tensors = (*spec.inputs, *spec.outputs)
    lines = ["// generated: types, argument indices and launch parameters", "#include <cstdint>", "#include <cstddef>"]
    lines.append(_CUDA_TYPES if cuda else _HOST_TYPES)
    lines.append("namespace jk {")
    numbered: dict[str, dict[int, int]] = {}
    for i, tensor in enumerate(tensors):
        lines.append(f"constexpr int {tensor.role} = {i};  using {tensor.role}_t = {_TYPES.get(tensor.dtype, 'void')};")
        lines.append(f"constexpr int {tensor.role}_rank = {len(tensor.dims)};")
        lines.append(f"#define JK_HAVE_{tensor.role} 1")
        if match := re.fullmatch(r"([a-z_]+)(\d+)", tensor.role):
            numbered.setdefault(match[1], {})[int(match[2])] = i
    count = max((max(v) + 1 for v in numbered.values()), default=0)
    for stem, indices in numbered.items():
        lines.append(f"constexpr int {stem}_list[] = {{{', '.join(str(indices.get(i, -1)) for i in range(count))}}};")
    lines += [f"constexpr int siblings = {count};", "}", f"#define JK_HAVE_BIAS {int('bias' in numbered)}"]
    lines += ["#define JK_SIZE(role, d) (meta[16 * jk::role + (d)])", "#define JK_STRIDE(role, d) (meta[16 * jk::role + 8 + (d)])"]
    lines.append("#define JK_DATA(role) (reinterpret_cast<jk::role##_t*>(data[jk::role]))")
    lines += [f"#define JK_PARAM_{name} (params[{i}])" for i, (name, _) in enumerate(spec.params)]
    lines += [f"#define {name} {int(v) if isinstance(v, bool) else v}" for name, v in params]
    return "\n".join(lines) + "\n"


def source(candidate: Candidate, spec: Spec, *, cuda: bool) -> str:
    """The text that the compiler sees."""
    return prelude(spec, candidate.params, cuda=cuda) + '#line 1 "kernel"\n' + candidate.source


class KernelError(RuntimeError):
    """A compiled kernel returned an error code."""


def bind(library: Path, spec: Spec, stream: Callable[[Any], int]) -> Kernel:
    """Wraps a built library as a Kernel: outputs are allocated here, contiguous; a scattered input is made dense first.

    Args:
        stream: the first input -> the CUDA stream's handle (0 on a CPU).
    """
    import torch

    function = ctypes.CDLL(str(library)).jasperk_run
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    count = len(spec.inputs) + len(spec.outputs)
    constants = (ctypes.c_double * max(1, len(spec.params)))(*(float(v) for _, v in spec.params))
    params = ctypes.addressof(constants)
    where = {s: (i, d) for i, t in reversed(list(enumerate(spec.inputs))) for d, s in enumerate(t.dims) if isinstance(s, str)}
    dtypes = [getattr(torch, t.dtype) for t in spec.outputs]
    known: dict[Any, tuple[Any, int, list[tuple[Any, Any, torch.dtype]]]] = {}

    def describe(inputs: tuple[torch.Tensor, ...]) -> tuple[Any, int, list[tuple[Any, Any, torch.dtype]]]:
        sizes = {s: inputs[i].shape[d] for s, (i, d) in where.items()}
        dense = [torch.empty(t.shape(sizes), device="meta") for t in spec.outputs]
        meta = (ctypes.c_int64 * (META * count))()
        for i, tensor in enumerate((*inputs, *dense)):
            meta[META * i : META * i + tensor.dim()] = list(tensor.shape)
            meta[META * i + 8 : META * i + 8 + tensor.dim()] = list(tensor.stride())
        return meta, ctypes.addressof(meta), [(tuple(t.shape), t.stride(), d) for t, d in zip(dense, dtypes, strict=True)]

    # A call takes a few microseconds of Python, which is as much as a small operator: hence the flat style below.
    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key = tuple([(t.shape, t.stride()) for t in inputs])
        found = known.get(key)
        if found is None:
            if any(t.dim() and t.stride(-1) != 1 and t.shape[-1] != 1 for t in inputs):
                return run(*(t.contiguous() for t in inputs))
            if len(known) > 1024:  # a server with endless shapes must not grow without bound
                known.clear()
            found = known[key] = describe(inputs)
        _, meta, wanted = found
        device = inputs[0].device
        outputs = tuple([torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in wanted])
        data = array("Q", [t.data_ptr() for t in inputs] + [t.data_ptr() for t in outputs])
        code = function(data.buffer_info()[0], meta, params, stream(inputs[0]))
        if code:
            raise KernelError(f"the kernel of {spec.family} returned error code {code}")
        return outputs

    run.constants = constants  # type: ignore[attr-defined]  # the library holds their address
    return run
