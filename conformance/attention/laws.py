"""What a law is, and how a law of equal bits is checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch

from ...core.attention import Capabilities
from .cases import AttentionCase, CaseData, expect
from .subject import LawViolation, Result, Subject, check_meaning, describe, same_bits

Kind = Literal["any", "decode", "prefill", "one"]


class NotTried(Exception):  # noqa: N818 - it is no error of anybody
    """A law could not be tried here; the text says why."""


class Law(ABC):
    """One thing that every backend owes.

    The docstring of a subclass is its text for kernel authors; the first line is its title.

    Class attributes:
        name: how reports and ``--only law=...`` call it.
        kind: batches that it is tried on: any, decode only, prefill only, or just one sequence.
        bitwise: whether it is about equal bits; a backend may declare in
            ``Capabilities.not_bitwise`` that it keeps it within the error bound only.
        weight: random cases, as a multiple of what other laws get.
        once: whether one case says everything about it.
        every_dtype: whether it is tried with every dtype.
        directed: whether it is tried on a fixed case for every value of every axis, not only on a
            few.
        attends: whether its examples count as examples of what a case has in it.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind] = "any"
    bitwise: ClassVar[bool] = False
    weight: ClassVar[int] = 1
    once: ClassVar[bool] = False
    every_dtype: ClassVar[bool] = True
    directed: ClassVar[bool] = False
    attends: ClassVar[bool] = True

    def not_claimed(self, capabilities: Capabilities, dtype: torch.dtype) -> str | None:
        """Why a backend with these capabilities does not owe this; None if it does."""
        return None

    def kind_for(self, mixed_batches: bool) -> Kind:
        """The kind of batches for a backend that takes mixed batches, or not."""
        return self.kind

    def fit(self, case: AttentionCase) -> AttentionCase:
        """The case, changed as far as the law needs."""
        return case

    @abstractmethod
    def check(self, subject: Subject, case: AttentionCase) -> float:
        """Try the law on a case.

        Returns:
            The largest error seen, as a share of its bound; 0 where only bits were compared.

        Raises:
            LawViolation: the backend does not keep it.
            NotTried: this machine cannot try it.
        """

    @classmethod
    def title(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or cls.name).strip().splitlines()[0]


class BitwiseLaw(Law):
    """A law that two results are equal to the last bit."""

    bitwise = True

    def compare(
        self, subject: Subject, what: str, first: Result, second: Result, data: CaseData
    ) -> float:
        """Compare all query rows of two results of the same batch.

        Args:
            subject: whose they are.
            what: how the second one came about, for messages: "with ..., the output changes".
            first: the plain result.
            second: the one that should be equal to it.
            data: the case of the second.

        Returns:
            As ``check``.

        Raises:
            LawViolation: a bit differs; or, if the backend declares that it keeps the law within
                the bound only, an error is above the bound.
        """
        count = first.num_tokens
        if self.name in subject.capabilities.not_bitwise:
            return check_meaning(second, data, what=f"with {what}, the output")
        pairs = [(first.out[:count], second.out[:count], "output")]
        if first.lse is not None and second.lse is not None:
            pairs.append((first.lse[:count], second.lse[:count], "LSE"))
        for one, other, name in pairs:
            if not same_bits(one, other):
                text = describe(
                    f"with {what}, the {name}", other, one.double(), torch.zeros_like(one)
                )
                # Whether the second is right as well tells the reader what kind of fault it is.
                raise LawViolation(
                    text.replace("is wrong in", "changes in").split(", an error of")[0],
                    data,
                    second,
                    expect(data),
                )
        return 0.0
