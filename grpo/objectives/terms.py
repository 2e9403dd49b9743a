"""Terms of equation 1 beside the policy's. An appendix has them; an Algorithm asks each of them this."""

from typing import Any, Protocol


class OtherTerm(Protocol):
    """Settings of a term of equation 1 beside the policy's: the cross-entropy with a text, the divergence to a teacher."""

    active: bool  # whether it has a weight
    of_logprobs: bool  # whether it has a gradient in the log-probabilities
    needs_old: bool  # whether it needs the old policy

    def tried(self) -> None:
        """Raise UserError if its function fails on random numbers."""

    def check_age(self, a: Any, cause: str) -> None:
        """Raise UserError if it takes samples of an older policy as the policy's own. cause: the setting that makes them old."""


class WithTerms:
    """The part of an Algorithm that knows its terms. imitation, teacher: None if the run has no such term."""

    policy_coef: float
    imitation: OtherTerm | None
    teacher: OtherTerm | None

    @property
    def others(self) -> list[OtherTerm]:
        """The other terms of equation 1 that have a weight."""
        return [term for term in (self.imitation, self.teacher) if term and term.active]

    @property
    def of_logprobs(self) -> bool:
        """Whether the loss has a gradient in the log-probabilities."""
        return bool(self.policy_coef) or any(term.of_logprobs for term in self.others)

    @property
    def compares(self) -> bool:
        """Whether the loss asks how probable a token was when it was sampled. Texts were not sampled."""
        return bool(self.policy_coef or (self.teacher and self.teacher.active))
