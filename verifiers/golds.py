"""Whether the golds of a dataset score 1 with their own verifiers: if not, no response ever could."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.errors import DataError
from headway.core.prompts import Prompt
from headway.verifiers.pool import VerifierPool
from headway.verifiers.registry import lookup
from headway.verifiers.verdict import Item

MEANINGLESS = "\\boxed{?}"
"""A response that no gold accepts."""
PAYS_MEANINGLESS = "pays_meaningless"
UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class GoldCheck:
    """What came of scoring a prompt's gold, given as a policy would give it, and a meaningless answer beside it."""

    prompt: Prompt
    reason: str
    """correct; unchecked: a gold of this kind is no answer; pays_meaningless: the meaningless answer gets 1 too;
    bad_gold: there is no answer in the gold; else the reason why the gold does not score 1."""
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.reason not in ("correct", UNCHECKED)


def check_golds(pool: VerifierPool, prompts: Sequence[Prompt]) -> list[GoldCheck]:
    """One check per prompt, in order. Raises `DataError` for an unknown verifier, and as `VerifierPool.score`."""
    presented: list[Sequence[str] | DataError] = []
    for prompt in prompts:
        family = lookup(prompt.verifier)
        try:
            presented.append(family.present(prompt.gold, prompt.context))
        except DataError as error:
            presented.append(error)
    verdicts = iter(
        pool.score([
            Item(prompt.verifier, prompt.gold, response, prompt.context, prompt.text)
            for prompt, responses in zip(prompts, presented, strict=True)
            if not isinstance(responses, DataError) and responses
            for response in (*responses, MEANINGLESS)
        ])
    )  # fmt: skip
    checks: list[GoldCheck] = []
    for prompt, responses in zip(prompts, presented, strict=True):
        if isinstance(responses, DataError):
            checks.append(GoldCheck(prompt, "bad_gold", str(responses)))
            continue
        if not responses:
            checks.append(GoldCheck(prompt, UNCHECKED))
            continue
        golds, meaningless = [next(verdicts) for _ in responses], next(verdicts)
        if all(gold.score != 1.0 for gold in golds):
            first = golds[0]
            detail = f"score {first.score}, extracted {first.extracted!r}"
            if first.reason == "bad_gold" and first.extracted is not None:  # there it says what is wrong
                detail = first.extracted
            checks.append(GoldCheck(prompt, first.reason, detail))
        elif meaningless.score == 1.0:
            checks.append(GoldCheck(prompt, PAYS_MEANINGLESS, f"{MEANINGLESS} scores 1"))
        else:
            checks.append(GoldCheck(prompt, "correct"))
    return checks
