"""Random numbers without state: the k-th number of a stream is a function of its seed and of k.

A request's k-th draw therefore does not depend on what it is batched with, on the order of the
batch, on preemption or on the device. The generator is SplitMix64 read at an arbitrary position
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014,
https://doi.org/10.1145/2660193.2660195, with the finaliser "variant 13" of David Stafford,
https://zimbry.blogspot.com/2011/09/better-bit-mixing-improving-on.html). The seed is mixed before
it becomes the starting state, so that neighbouring seeds start at unrelated places.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, made odd
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
#: Keep the seeds of completions and of requests apart from the draws of a stream.
_CHILD_DOMAIN = 0x6A61636B6368696C
_REQUEST_DOMAIN = 0x6A61636B72657175


def uniforms(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64] | NDArray[np.uint64]
) -> NDArray[np.float64]:
    """The number at each position of each stream, uniform on [0, 1) in steps of ``2**-53``.

    Args:
        seeds: of the streams, ``[R]``, uint64.
        positions: which number of its stream, from 0, ``[R]``, int64.

    Returns:
        ``[R]``, float64.
    """
    steps = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    bits = _mix_array(_mix_array(seeds.astype(np.uint64)) + steps)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def child_seed(seed: int, index: int) -> int:
    """Seed of completion ``index`` of a request with this seed.

    It is to be used whatever ``n`` is, also for index 0: the completions of a seeded request are
    then reproducible, differ from each other, and the first one does not depend on ``n``.

    Args:
        seed: any integer; integers that are equal modulo ``2**64`` are one seed.
        index: of the completion, from 0.

    Returns:
        An integer in ``[0, 2**64)``.
    """
    return _combine(_mix(seed ^ _CHILD_DOMAIN), index)


def derive_seed(engine_seed: int, arrival_index: int, index: int) -> int:
    """Seed of completion ``index`` of a request that brought no seed.

    Args:
        engine_seed: the engine's setting, any integer.
        arrival_index: number of requests that arrived before this one.
        index: of the completion, from 0.

    Returns:
        An integer in ``[0, 2**64)``.
    """
    return child_seed(_combine(_mix(engine_seed ^ _REQUEST_DOMAIN), arrival_index), index)


def _combine(state: int, index: int) -> int:
    return _mix(state + (index + 1) * _GAMMA)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
