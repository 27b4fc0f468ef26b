"""Counter-based noise: the right distributions, independent between purposes, positions, rounds, tokens and seeds."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from dspark_ray.algorithm.noise import Purpose, gumbel, row_keys, uniform
from tests.algorithm.helpers import LEAST_P_VALUE

EDGE_SEEDS = [0, 1, -1, 2**63 - 1, -(2**63) + 1, 1 << 32]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def positions(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64)


@pytest.mark.parametrize("seed", EDGE_SEEDS)
@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniform_is_uniform_over_positions_for_edge_seeds(seed: int, purpose: Purpose) -> None:
    values = uniform(ints(seed).expand(20_000), positions(20_000), purpose)
    assert values.dtype == torch.float32
    assert values.min() > 0.0
    assert values.max() < 1.0
    assert kstest(values.numpy(), "uniform").pvalue > LEAST_P_VALUE


def test_uniform_is_uniform_over_neighbouring_seeds_and_over_rounds() -> None:
    fixed = ints(7).expand(20_000)
    for values in (
        uniform(positions(20_000), fixed, Purpose.ACCEPT),
        uniform(fixed, fixed, Purpose.ACCEPT, rounds=positions(20_000)),
        uniform(fixed, fixed, Purpose.ACCEPT, rounds=positions(20_000), dtype=torch.float64),
    ):
        assert kstest(values.numpy(), "uniform").pvalue > LEAST_P_VALUE


@pytest.mark.parametrize("seed", EDGE_SEEDS)
def test_gumbel_follows_its_distribution_over_tokens(seed: int) -> None:
    values = gumbel(ints(seed), ints(5), torch.arange(49_152))[0]
    assert torch.isfinite(values).all()
    assert kstest(values.numpy(), "gumbel_r").pvalue > LEAST_P_VALUE


def test_gumbel_follows_its_distribution_over_positions_and_seeds() -> None:
    token = torch.tensor([3])
    over_positions = gumbel(ints(11).expand(20_000), positions(20_000), token)[:, 0]
    over_seeds = gumbel(positions(20_000), ints(11).expand(20_000), token)[:, 0]
    assert kstest(over_positions.numpy(), "gumbel_r").pvalue > LEAST_P_VALUE
    assert kstest(over_seeds.numpy(), "gumbel_r").pvalue > LEAST_P_VALUE


def joint_p_value(first: torch.Tensor, second: torch.Tensor, cells: int = 16) -> float:
    """Chi-square of two streams of uniforms against independence, on a grid."""
    cell = (first * cells).long() * cells + (second * cells).long()
    return float(chisquare(np.bincount(cell.numpy(), minlength=cells * cells)).pvalue)


def test_streams_of_different_purposes_are_independent() -> None:
    seeds = ints(42).expand(50_000)
    streams = [uniform(seeds, positions(50_000), purpose) for purpose in Purpose]
    for i, first in enumerate(streams):
        for second in streams[i + 1 :]:
            assert joint_p_value(first, second) > LEAST_P_VALUE


def test_neighbouring_positions_rounds_and_seeds_are_independent() -> None:
    index, fixed = positions(50_000), ints(9).expand(50_000)
    base = uniform(fixed, index, Purpose.ACCEPT)
    assert joint_p_value(base[:-1], base[1:]) > LEAST_P_VALUE
    assert joint_p_value(base, uniform(fixed, index, Purpose.ACCEPT, rounds=1)) > LEAST_P_VALUE
    assert joint_p_value(base, uniform(fixed + 1, index, Purpose.ACCEPT)) > LEAST_P_VALUE


def test_gumbel_of_neighbouring_tokens_and_rows_is_independent() -> None:
    noise = gumbel(ints(1, 2, 1), ints(8, 8, 9), torch.arange(49_152))
    as_uniform = torch.exp(-torch.exp(-noise)).clamp(0, 1 - 1e-7)
    for row in as_uniform:
        assert joint_p_value(row[:-1], row[1:]) > LEAST_P_VALUE
    assert joint_p_value(as_uniform[0], as_uniform[1]) > LEAST_P_VALUE
    assert joint_p_value(as_uniform[0], as_uniform[2]) > LEAST_P_VALUE
    # The same token pairs up across many rows too.
    many = torch.exp(-torch.exp(-gumbel(ints(5).expand(50_000), positions(50_000), torch.tensor([7, 8]))))
    assert joint_p_value(*many.clamp(0, 1 - 1e-7).unbind(1)) > LEAST_P_VALUE


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    seeds, where = ints(3, -4), ints(10, 11)
    whole = gumbel(seeds, where, torch.arange(1000))
    some = torch.tensor([[999, 0, 17], [4, 4, 500]])
    assert torch.equal(gumbel(seeds, where, some), whole.gather(1, some))
    assert torch.equal(gumbel(seeds[1:], where[1:], torch.arange(1000))[0], whole[1])


def test_bits_never_change() -> None:
    # Pinned: a drafter of one version and a target of another must agree, and a seed must keep its text.
    assert row_keys(ints(0, -1), ints(0, 5), Purpose.ACCEPT, 3).tolist() == [805799119295017842, -5461348049635366966]
    assert uniform(ints(1), ints(2), Purpose.BONUS).item() == pytest.approx(0.9391123056411743, abs=0)
    noise = gumbel(ints(123), ints(45), torch.arange(4))
    assert np.allclose(noise[0].numpy(), [0.82198662, 0.62530899, 0.7729252, 0.40262803], atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_are_equal_on_cpu_and_gpu() -> None:
    seeds, where = ints(*EDGE_SEEDS), ints(0, 1, 2, 3, 4, 2**31)
    assert torch.equal(
        row_keys(seeds, where, Purpose.ACCEPT, 7), row_keys(seeds.cuda(), where.cuda(), Purpose.ACCEPT, 7).cpu()
    )
    cpu = gumbel(seeds, where, torch.arange(49_152))
    gpu = gumbel(seeds, where, torch.arange(49_152, device="cuda")).cpu()
    torch.testing.assert_close(cpu, gpu, rtol=1e-5, atol=1e-5)
