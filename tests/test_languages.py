from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import SCALE_CPP, scale_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from jasperk_inductor.contract import Candidate, Status, TensorSpec
from jasperk_inductor.errors import MissingTool, UnknownName
from jasperk_inductor.families import families, kernels_dir
from jasperk_inductor.languages import LANGUAGES, BuildFailed, abi, bundle, compile, cpp, cuda, language
from jasperk_inductor.languages.base import Language

TRITON = """
import torch
import triton
import triton.language as tl

@triton.jit
def _scale(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2 + 1, mask=i < n)

def run(x, BLOCK):
    x = x.contiguous()
    y = torch.empty_like(x)
    _scale[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y
"""


def built(name: str, source: str, folder: Path, **params: int):
    one, spec = language(name), scale_problem().spec
    candidate = Candidate(name, source, tuple(params.items()))
    one.build(candidate, spec, folder, 60.0)
    return one.load(folder, candidate, spec)


def test_cpp_builds_and_runs(tmp_path: Path) -> None:
    kernel = built("cpp", SCALE_CPP, tmp_path)
    x = torch.randn(5, 64)
    (y,) = kernel(x)
    assert torch.equal(y, x * 2 + 1)


def test_cpp_sees_true_strides_and_a_dense_last_dimension(tmp_path: Path) -> None:
    kernel = built("cpp", SCALE_CPP, tmp_path)
    wide = torch.randn(5, 100)[:, :64]
    turned = torch.randn(64, 5).t()
    for x in (wide, turned):
        assert torch.equal(kernel(x)[0], x * 2 + 1)


def test_a_kernel_s_error_code_is_an_error(tmp_path: Path) -> None:
    kernel = built("cpp", SCALE_CPP.replace("return 0;", "return 7;"), tmp_path)
    with pytest.raises(abi.KernelError, match="7"):
        kernel(torch.randn(1, 64))


def test_a_compiler_error_names_the_line_of_the_source(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="kernel:4"):
        built("cpp", SCALE_CPP.replace("float* y = JK_DATA(y);", "float* y = JK_DATA(z);"), tmp_path)


def test_a_compiler_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setenv("JASPERK_CXX", str(slow))
    with pytest.raises(BuildFailed) as failed:
        language("cpp").build(Candidate("cpp", SCALE_CPP), scale_problem().spec, tmp_path, 0.5)
    assert failed.value.status is Status.BUILD_TIMEOUT


def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install g++" in (cpp.missing("cpu") or "")
    with pytest.raises(MissingTool, match="install g"):
        language("cpp").build(Candidate("cpp", SCALE_CPP), scale_problem().spec, tmp_path, 5.0)


def test_a_prebuilt_binary_is_used_and_counted_as_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, spec = Candidate("cpp", SCALE_CPP), scale_problem().spec
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "ready").mkdir()
    language("cpp").build(candidate, spec, tmp_path / "a", 60.0)
    name = compile.fingerprint(abi.source(candidate, spec, cuda=False), cpp.flags())
    shutil.copy(tmp_path / "a" / "kernel.so", tmp_path / "ready" / f"{name}.so")
    monkeypatch.setattr(compile, "PREBUILT", tmp_path / "ready")
    monkeypatch.setenv("PATH", "")
    before = compile.builds
    language("cpp").build(candidate, spec, tmp_path / "b", 60.0)
    assert compile.builds == before
    assert torch.equal(language("cpp").load(tmp_path / "b", candidate, spec)(torch.ones(1, 64))[0], torch.full((1, 64), 3.0))


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("int main() { return 0; }", Status.NO_CUSTOM_KERNEL),
        (SCALE_CPP + "#include <cstdlib>\n", Status.FORBIDDEN),
        (SCALE_CPP.replace("return 0;", 'system("true"); return 0;'), Status.FORBIDDEN),
        (SCALE_CPP.replace("return 0;", "cblas_sgemm(); return 0;"), Status.NO_CUSTOM_KERNEL),
        (SCALE_CPP.replace("return 0;", "_exit(0); return 0;"), Status.FORBIDDEN),
    ],
)
def test_cpp_screen_refuses(source: str, status: Status) -> None:
    refused = language("cpp").screen(source)
    assert refused is not None
    assert refused[0] is status


def test_cpp_screen_reads_code_and_not_comments_or_strings() -> None:
    assert language("cpp").screen(SCALE_CPP + '// system("rm") and cublas in a comment\nstatic const char* s = "exit(1)";\n') is None


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("def run(x:\n", Status.BUILD_FAILED),
        ("import torch\ndef run(x): return torch.relu(x)\n", Status.NO_CUSTOM_KERNEL),
        ("import os\n" + TRITON, Status.FORBIDDEN),
        (TRITON.replace("    y = torch.empty_like(x)", "    y = eval('x')"), Status.FORBIDDEN),
        (TRITON.replace("    _scale[(triton", "    print(_scale)\n    return x * 2 + 1\n    _unused[(triton"), Status.NO_CUSTOM_KERNEL),
        (TRITON.replace("def run(x, BLOCK):", "def run(x, BLOCK):\n    try:\n        pass\n    except Exception:\n        return x * 2 + 1"), Status.FORBIDDEN),
        (TRITON.replace("    y = torch.empty_like(x)", "    y = torch._C._nn.gelu(x)"), Status.FORBIDDEN),
    ],
)  # fmt: skip
def test_triton_screen_refuses(source: str, status: Status) -> None:
    refused = language("triton").screen(source)
    assert refused is not None
    assert refused[0] is status, refused


def test_screens_accept_honest_kernels() -> None:
    assert language("cpp").screen(SCALE_CPP) is None
    assert language("triton").screen(TRITON) is None
    assert language("triton").screen(TRITON.replace("return y", "for _ in range(0):\n        pass\n    return torch.relu(y) + y")) is None


def test_plain_torch_is_no_candidate() -> None:
    refused = language("torch").screen("import torch\ndef run(x):\n    return x * 2 + 1\n")
    assert refused is not None
    assert refused[0] is Status.NO_CUSTOM_KERNEL


@pytest.mark.parametrize("family", sorted(families()))
@pytest.mark.parametrize("name", ["cpp", "triton", "cuda"])
def test_shipped_kernels_pass_their_own_screen(family: str, name: str) -> None:
    path = kernels_dir() / family / LANGUAGES[name].file
    if not path.exists():
        pytest.skip(f"no {name} kernel")
    assert LANGUAGES[name].screen(bundle.read(path)) is None


def test_a_bundle_holds_each_shared_part_once_and_includes_nothing_of_ours() -> None:
    text = bundle.read(kernels_dir() / "residual_rmsnorm" / "cpu.cpp")
    assert text.count("namespace simd {") == 1
    assert '#include "' not in text
    assert "jasperk_kernels" not in bundle.read(kernels_dir() / "ffn_down" / "triton.py")


def test_an_unknown_language_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="'triton'"):
        language("tritn")


def test_every_language_is_complete() -> None:
    for name, one in LANGUAGES.items():
        assert isinstance(one, Language)
        assert one.name == name


@given(st.integers(1, 7), st.integers(1, 5), st.booleans())
@settings(max_examples=10, deadline=None)
def test_the_prelude_depends_on_roles_and_types_only(width: int, rank: int, bias: bool) -> None:
    roles = ["x", "weight0", *(["bias0"] if bias else [])]
    spec = scale_problem().spec
    one, two = (
        type(spec)(
            "f", tuple(TensorSpec(r, ("r0",) * (rank - 1) + (n,), "bfloat16") for r in roles), (TensorSpec("out0", (n,), "bfloat16"),)
        )
        for n in (width, width + 1)
    )
    assert abi.prelude(one, [], cuda=False) == abi.prelude(two, [], cuda=False)
    assert f"#define JK_HAVE_BIAS {int(bias)}" in abi.prelude(one, [], cuda=False)


@pytest.mark.skipif(cuda.nvcc() is None, reason="needs nvcc")
def test_cuda_kernels_build_for_hopper(tmp_path: Path) -> None:
    from helpers import card_problems

    for family in ("ffn_down", "residual_rmsnorm"):
        site = card_problems(dtype="bfloat16")[family]
        source = bundle.read(kernels_dir() / family / "kernel.cu")
        params = families()[family].space["cuda"](site.problem.spec, site.rows)[0]
        folder = tmp_path / family
        folder.mkdir()
        language("cuda").build(Candidate("cuda", source, tuple(params.items())), site.problem.spec, folder, 120.0)
        assert (folder / "kernel.so").stat().st_size > 10_000
        if dump := shutil.which("cuobjdump"):
            assert "sm_90a" in subprocess.run([dump, "-lelf", str(folder / "kernel.so")], capture_output=True, text=True, check=True).stdout


def test_compilers_get_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "42")
    spy = tmp_path / "spy"
    spy.write_text(f"#!/bin/sh\nenv > {tmp_path}/env\nexit 1\n")
    spy.chmod(0o755)
    monkeypatch.setenv("JASPERK_CXX", str(spy))
    with pytest.raises(BuildFailed):
        language("cpp").build(Candidate("cpp", SCALE_CPP), scale_problem().spec, tmp_path, 5.0)
    assert "SECRET" not in (tmp_path / "env").read_text()
    assert os.environ["SECRET"] == "42"
