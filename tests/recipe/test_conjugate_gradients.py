"""Conjugate gradients against a direct solve, and where they must stay put."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from innerloop.algebra.conjugate_gradients import conjugate_gradients

ROWS, K = 5, 6


@pytest.fixture
def system():
    generator = torch.Generator().manual_seed(3)
    root = torch.randn(ROWS, K, K, dtype=torch.float64, generator=generator)
    matrix = root @ root.mT + 0.1 * torch.eye(K, dtype=torch.float64)
    return matrix, torch.randn(ROWS, K, dtype=torch.float64, generator=generator)


def solve(matrix, rhs, iterations, jacobi=True):
    diagonal = matrix.diagonal(dim1=-2, dim2=-1) if jacobi else None
    return conjugate_gradients(
        lambda x: (matrix @ x.unsqueeze(-1)).squeeze(-1), rhs, iterations=iterations, diagonal=diagonal
    )


def relative(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("jacobi", [True, False])
def test_twice_the_width_in_steps_reaches_the_direct_solve(system, jacobi):
    matrix, rhs = system
    assert relative(solve(matrix, rhs, 2 * K, jacobi), torch.linalg.solve(matrix, rhs)) < 1e-11


def test_no_step_is_the_jacobi_start(system):
    matrix, rhs = system
    assert torch.equal(solve(matrix, rhs, 0), rhs / matrix.diagonal(dim1=-2, dim2=-1))
    assert torch.equal(solve(matrix, rhs, 0, jacobi=False), torch.zeros_like(rhs))


def test_the_error_in_the_energy_norm_falls_with_every_step(system):
    matrix, rhs = system
    want = torch.linalg.solve(matrix, rhs)
    errors = [solve(matrix, rhs, n) - want for n in range(K)]
    energy = torch.stack([torch.einsum("rk,rkl,rl->r", e, matrix, e) for e in errors])
    assert (energy[1:] < energy[:-1]).all()


def test_the_first_step_is_the_steepest_descent_of_the_preconditioned_system(system):
    matrix, rhs = system
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    x = rhs / diagonal
    residual = rhs - (matrix @ x.unsqueeze(-1)).squeeze(-1)
    z = residual / diagonal
    length = (residual * z).sum(-1) / torch.einsum("rk,rkl,rl->r", z, matrix, z)
    assert relative(solve(matrix, rhs, 1), x + length[:, None] * z) < 1e-14


@pytest.mark.parametrize("iterations", [1, 7, 400])
def test_a_row_of_zeros_stays_zero_and_its_neighbours_are_solved_alike(system, iterations):
    matrix, rhs = system
    alone = solve(matrix[1:], rhs[1:], iterations)
    rhs = rhs.clone()
    rhs[0] = 0
    got = solve(matrix, rhs, iterations)
    assert (got[0] == 0).all()
    assert relative(got[1:], alone) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_solved_row_stays_put_however_long_it_goes_on(system, dtype):
    matrix, rhs = (x.to(dtype) for x in system)
    many, more = solve(matrix, rhs, 100), solve(matrix, rhs, 1000)
    assert more.isfinite().all()
    assert torch.equal(many, more)


@pytest.mark.parametrize("iterations", [2, 20])
def test_steps_can_be_differentiated_twice_before_and_after_convergence(system, iterations):
    matrix, rhs = system[0][:2, :3, :3].clone(), system[1][:2, :3].clone()
    rhs[1, 0] = 0

    def symmetric(matrix, rhs):
        return solve((matrix + matrix.mT) / 2, rhs, iterations)

    leaves = (matrix.requires_grad_(), rhs.requires_grad_())
    assert gradcheck(symmetric, leaves)
    assert gradgradcheck(symmetric, leaves, fast_mode=True)


def test_gradients_after_convergence_are_those_of_the_solution(system):
    matrix, rhs = (x.clone().requires_grad_() for x in system)
    got = torch.autograd.grad(solve(matrix, rhs, 60).square().sum(), (matrix, rhs))
    want = torch.autograd.grad(torch.linalg.solve(matrix, rhs).square().sum(), (matrix, rhs))
    assert relative(got[1], want[1]) < 1e-9
    assert relative(got[0] + got[0].mT, want[0] + want[0].mT) < 1e-9


def test_a_zero_right_hand_side_has_a_finite_gradient(system):
    matrix, rhs = system
    rhs = torch.zeros_like(rhs, requires_grad=True)
    slope = torch.autograd.grad(solve(matrix, rhs, 5).sum(), rhs)[0]
    assert slope.isfinite().all()


def test_each_row_is_solved_to_its_own_scale(system):
    matrix, rhs = system
    scale = 2.0 ** torch.arange(-100, 150, 50, dtype=torch.float64)[:, None]
    for iterations in (3, 2 * K):
        assert torch.equal(solve(matrix, scale * rhs, iterations), scale * solve(matrix, rhs, iterations))


def test_a_system_that_needs_many_steps_is_solved_to_rounding():
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64, generator=generator))[0]
    matrix = ((basis * torch.logspace(0, 4, 40, dtype=torch.float64)) @ basis.mT)[None]
    want = torch.randn(1, 40, dtype=torch.float64, generator=generator)
    rhs = (matrix @ want.unsqueeze(-1)).squeeze(-1)
    assert relative(solve(matrix, rhs, 30), want) > 1e-6
    assert relative(solve(matrix, rhs, 400), want) < 1e-11
