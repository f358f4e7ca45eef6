from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from jasperk_inductor import reference
from jasperk_inductor.errors import BadProblem

SOURCE = """import torch
import torch.nn.functional as F

def reference(x, w):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return ((h * (1.0 + w.float())).type_as(x), F.softmax(x, -1, dtype=torch.float32))
"""


def test_exact_runs_everything_in_float64() -> None:
    x, w = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8)
    normed, soft = reference.exact(SOURCE, [x, w])
    assert normed.dtype == soft.dtype == torch.float64
    d = x.double()
    assert torch.allclose(normed, d * torch.rsqrt(d.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + w.double()), rtol=1e-13)
    assert torch.allclose(soft, F.softmax(d, -1), rtol=1e-13)


def test_widened_leaves_integers_and_what_is_written_in_place_alone() -> None:
    cache, index = torch.zeros(4), torch.tensor([1])
    with reference.widened(torch.float64):
        y = torch.ones(3, dtype=torch.bfloat16) * 2
        cache.index_copy_(0, index, y[:1])
        assert (index + 1).dtype == torch.int64
    assert y.dtype == torch.float64
    assert cache.dtype == torch.float32
    assert cache.tolist() == [0.0, 2.0, 0.0, 0.0]


def test_widening_to_float32_does_not_narrow_float64() -> None:
    with reference.widened(torch.float32):
        assert (torch.ones(2, dtype=torch.float64).float()).dtype == torch.float32
        assert (torch.ones(2, dtype=torch.float16) + 1).dtype == torch.float32
        assert (torch.ones(2, dtype=torch.float64) + 1).dtype == torch.float64


@pytest.mark.parametrize("source", ["def reference(x:\n", "x = 1\n", "import nothing_of_the_kind\n"])
def test_a_reference_that_does_not_load_says_so(source: str) -> None:
    with pytest.raises(BadProblem, match="reference"):
        reference.load(source)
