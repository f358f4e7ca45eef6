"""C++ for CPUs: one translation unit without torch headers, OpenMP threads, the machine's own vector instructions."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from pathlib import Path

from ..contract import Candidate, Spec, Status
from . import abi
from .base import Kernel, Language
from .compile import LIBRARY, compile_library, find_tool

_FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
TOOL = "a C++ compiler is needed: install g++ (Debian and Ubuntu: `apt-get install g++`) or set JASPERK_CXX"

_INCLUDES = re.compile(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", re.MULTILINE)
_ALLOWED = {
    "algorithm", "array", "cmath", "cstddef", "cstdint", "cstring", "cfloat", "climits", "limits", "math.h", "numeric",
    "type_traits", "utility", "vector", "immintrin.h", "x86intrin.h", "arm_neon.h", "omp.h",
    "cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cuda.h", "cooperative_groups.h", "mma.h",
    "cuda/barrier", "cuda/pipeline", "cuda/std/utility", "cooperative_groups/reduce.h", "cooperative_groups/memcpy_async.h",
}  # fmt: skip
_FORBIDDEN = re.compile(
    r"\b(system|popen|fork|vfork|clone|exec[lv]p?e?|dlopen|dlsym|dlmopen|ptrace|syscall|mmap|mprotect|kill|raise|abort|_?exit|signal|"
    r"sigaction|socket|open|fopen|ofstream|ifstream|unlink|getenv|setenv|pthread_create|asm\s*\(\s*\"\s*syscall)\s*\(|"
    r"\b(std\s*::\s*(thread|async|system|abort|exit|quick_exit|filesystem|(i|o)?fstream))\b|__attribute__\s*\(\(\s*constructor"
)
_LIBRARIES = re.compile(r"\b(cblas_|cublas|cudnn|cutlass::|mkl_|dnnl|at::|torch::|cusparse|cusolver)\w*")


def screen(source: str) -> tuple[Status, str] | None:
    """Static rules for C++ and CUDA C++ text, comments and strings left out."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    if not re.search(r'extern\s+"C"\s+int\s+jasperk_run\s*\(', text):
        return Status.NO_CUSTOM_KERNEL, 'the source must define extern "C" int jasperk_run(...)'
    for header in _INCLUDES.findall(text):
        if header not in _ALLOWED:
            return Status.FORBIDDEN, f"the header {header} is not on the list of allowed ones"
    bare = re.sub(r'"(\\.|[^"\\\n])*"', '""', text)
    if library := _LIBRARIES.search(bare):
        return Status.NO_CUSTOM_KERNEL, f"it calls a library ({library[0]}); a candidate must do its own work"
    if call := _FORBIDDEN.search(bare):
        return Status.FORBIDDEN, f"it may not use {call[0].strip(' (')}"
    return None


@functools.cache
def flags() -> list[str]:
    """Compiler flags. The processor's name is among them, as a macro: -march=native means another thing on another machine, and
    a binary's name is a fingerprint of its flags."""
    model = "unknown"
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        lines = [line for line in file if line.startswith(("model name", "flags"))][:2]
        model = hashlib.sha256("".join(lines).encode()).hexdigest()[:12]
    return [*_FLAGS, f"-DJASPERK_CPU_{model}"]


def missing(device: str) -> str | None:
    return None if find_tool("JASPERK_CXX", "g++") else TOOL


def build(candidate: Candidate, spec: Spec, folder: Path, timeout: float) -> None:
    compiler = find_tool("JASPERK_CXX", "g++")
    compile_library(compiler, flags(), abi.source(candidate, spec, cuda=False), ".cpp", folder, timeout, TOOL)


def load(folder: Path, candidate: Candidate, spec: Spec) -> Kernel:
    return abi.bind(folder / LIBRARY, spec, lambda _: 0)


LANGUAGE = Language("cpp", "cpu.cpp", ("cpu",), missing, screen, build, load)
