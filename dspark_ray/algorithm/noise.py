"""Counter-based noise: every random number of a verification is a hash of what it is for, so no stream is ever shared.

Knows nothing of probabilities. The same bits come out on CPU and GPU: integer arithmetic only, until one final
conversion to float32. Letters: N rows, V vocabulary, k candidates.
"""

from enum import IntEnum

import torch

_MASK31 = (1 << 31) - 1
_BELOW_ONE = 1.0 - 2.0**-24


class Purpose(IntEnum):
    """Streams that must be independent: reusing one for two decisions biases the output."""

    COUPLED = (
        0  # Gumbel noise that drafter and target share; always round 0, so that it is a function of the seed alone
    )
    ACCEPT = 1  # accept or reject a draft token
    RECOVER = 2  # draw from the residual after a rejection
    BONUS = 3  # draw from p after full acceptance, or without a draft
    DRAFT = 4  # a drafter that wants counted noise of its own


def uniform(
    seeds: torch.Tensor,  # [N] int64
    positions: torch.Tensor,  # [N] int64
    purpose: int,
    rounds: torch.Tensor | int = 0,  # [N] int64, or one for all
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One number in (0, 1) a row [N]: 31 random bits in float32, 52 in float64.

    `rounds` tells apart two visits of one position (a position is visited again after a rejection or a preemption).
    """
    keys = row_keys(seeds, positions, purpose, rounds)
    if dtype == torch.float64:
        return (_shift64(keys, 12).to(torch.float64) + 0.5) * 2.0**-52
    return _unit_interval(_shift64(keys, 33))


def gumbel(
    seeds: torch.Tensor,  # [N] int64
    positions: torch.Tensor,  # [N] int64
    token_ids: torch.Tensor,  # [V] the same for all rows, or [N, k]; any integer dtype
    purpose: int = Purpose.COUPLED,
    rounds: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Standard Gumbel noise g(seed, position, token), float32 [N, V] or [N, k] on the device of `token_ids`.

    argmax over tokens of (log p + g) is a sample of p (Gumbel-max). The noise of a token does not depend on which other
    tokens are asked for.
    """
    keys = row_keys(seeds, positions, purpose, rounds)
    halves = keys.view(torch.int32).reshape(-1, 2).to(token_ids.device)
    bits = _mix_tokens(token_ids.to(torch.int32), halves[:, :1], halves[:, 1:])
    # -log(E) with E = -log(1 - w) exponential. w has its finest steps near 0, where the winner of an argmax over a
    # large vocabulary lies; building E from 1 - w directly would leave ties there.
    return _unit_interval(bits).neg_().log1p_().neg_().log_().neg_()


def row_keys(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: int, rounds: torch.Tensor | int = 0
) -> torch.Tensor:  # [N] int64
    """64 hashed bits for each (seed, position, purpose, round). Any int64 seed is fine, 0 and negative ones too."""
    # Odd multipliers: small counters cannot meet in a wrapping 64-bit sum.
    rounds = torch.as_tensor(rounds, dtype=torch.int64, device=positions.device)
    counter = positions * _signed(0x9E3779B97F4A7C15, 64) + rounds * _signed(0xD1342543DE82EF95, 64)
    counter = counter + _signed((int(purpose) + 1) * 0xA24BAED4963EE407 % 2**64, 64)
    return _mix64(_mix64(seeds + _signed(0x9E3779B97F4A7C15, 64)) ^ counter)


def _mix64(bits: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014); int64 products wrap alike on every device."""
    bits = (bits ^ _shift64(bits, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    bits = (bits ^ _shift64(bits, 27)) * _signed(0x94D049BB133111EB, 64)
    return bits ^ _shift64(bits, 31)


def _mix_tokens(tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """31 hashed bits for each token under each row's key: a two-round multiply-xorshift with the key fed in twice.

    In place on one buffer: this runs over rows as wide as the vocabulary. int32 shifts carry the sign, hence the masks.
    """
    bits = (tokens * _signed(0x9E3779B1, 32)) ^ low
    spare = torch.bitwise_right_shift(bits, 16)
    bits.bitwise_xor_(spare.bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D, 32)).add_(high)
    torch.bitwise_right_shift(bits, 15, out=spare)
    bits.bitwise_xor_(spare.bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B, 32))
    torch.bitwise_right_shift(bits, 16, out=spare)
    return bits.bitwise_xor_(spare).bitwise_and_(_MASK31)


def _unit_interval(bits: torch.Tensor) -> torch.Tensor:
    """31-bit integers to float32 in (0, 1): exact steps near 0, the largest clamped below 1."""
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)


def _shift64(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift (torch's carries the sign)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) else value
