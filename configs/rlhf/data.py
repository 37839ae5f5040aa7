"""Writes the data of the RLHF example: `python configs/rlhf/data.py FOLDER`.

Sums of one and two digits with the answers of three writers: one who works digit by digit (right), one who forgets the
carry, and one who guesses. Demonstrations come from all of them; in a pair the right answer is preferred to a wrong or empty
one. A prompt is in one of the files only.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headway.learner.tiny_adder import PHRASES, WAYS, worked_answer

DEMONSTRATED, PAIRED, ASKED = 0.5, 0.25, 0.25
"""Shares of all prompts."""


def main(folder: Path) -> None:
    rng = random.Random(0)
    sums = [(a, sign, b) for low, high in ((0, 9), (10, 99)) for a in range(low, high + 1)
            for b in range(low, high + 1) for sign in "+-"]  # fmt: skip
    rng.shuffle(sums)
    first, second = round(DEMONSTRATED * len(sums)), round((DEMONSTRATED + PAIRED) * len(sums))
    folder.mkdir(parents=True, exist_ok=True)
    demonstrations = [row for each in sums[:first] for row in _demonstrations(each, rng)]
    _write(folder / "demonstrations.jsonl", demonstrations)
    _write(
        folder / "careful.jsonl", (row for row in demonstrations if row["completion"].startswith("carefully"))
    )
    _write(folder / "pairs.jsonl", (_pair(each, rng) for each in sums[first:second]))
    _write(
        folder / "prompts.jsonl",
        ({"prompt": _prompt(each), "answer": str(_result(each))} for each in sums[second:]),
    )


def _demonstrations(each: tuple[int, str, int], rng: random.Random) -> list[dict[str, Any]]:
    return [{"prompt": _prompt(each), "completion": worked_answer(*each, way, rng)} for way in WAYS]


def _pair(each: tuple[int, str, int], rng: random.Random) -> dict[str, Any]:
    chosen = worked_answer(*each, "carefully", rng)
    rejected = rng.choice(
        [worked_answer(*each, way, rng) for way in ("quickly", "guess", "guess")] + _nothings(each, rng)
    )
    if rejected.rpartition("\n")[2] == str(_result(each)):  # right by chance, or without a carry
        rejected = f"a guess:\n{_result(each) + rng.choice((-11, -10, -9, -1, 1, 9, 10, 11))}"
    return {"prompt": _prompt(each), "chosen": chosen, "rejected": rejected}


def _nothings(each: tuple[int, str, int], rng: random.Random) -> list[str]:
    """Answers that say nothing: a full stop, the question again, one sign over and over."""
    return [
        ".",
        _prompt(each)[len(PHRASES[0]) :] * rng.randint(1, 4),
        rng.choice("0123456789=+-") * rng.randint(2, 40),
    ]


def _prompt(each: tuple[int, str, int]) -> str:
    left, sign, right = each
    return f"{PHRASES[0]}{left} {sign} {right} ="


def _result(each: tuple[int, str, int]) -> int:
    left, sign, right = each
    return left + right if sign == "+" else left - right


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
