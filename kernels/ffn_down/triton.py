"""Triton: down, as one skinny GEMM."""

from jasperk_kernels.shared.skinny_gemm import skinny_gemm


def run(x, *parameters, **launch):
    return skinny_gemm(x, parameters, **launch)
