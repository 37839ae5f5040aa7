"""Finding the answer in a response: the reasoning ends first, then the last box counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headway.verifiers.numbers import last_numbers, negated

_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SIDE_BY_SIDE = re.compile(
    r"(?:[\s,;.$/|*]|\\[,;:]|\\\(|\\\)|\\quad|\\text\s*\{\s*(?:or|and)\s*\}|\b(?:or|and)\b)*", re.IGNORECASE
)
_NO_PROSE = re.compile(
    r"(?![\s$]*(?:[=→⇒⟹∴]|->|\\(?:implies|(?:long)?rightarrow|therefore|to)\b))"  # the end of a derivation
    r"(?:\\(?:begin|end|[hv]space)\*?\s*\{[^{}]*\}|\\[A-Za-z]+|</?[A-Za-z]+\s*/?>|\d{1,2}[.)]|\b[A-Za-z]\b"
    r"|\b(?:or|and|else|either|also|alternatively|otherwise|maybe|perhaps|possibly|versus|vs)\b|[\W_])*+",
    re.IGNORECASE,
)
"""What may stand between boxes that are side by side: marks, markup, names, and words that join alternatives."""
_PLACEHOLDER = re.compile(
    r"(?:\.\.\.|…|\?|\\[lc]?dots)|(?:(?:your|the|final) )*answer(?: here)?", re.IGNORECASE
)
_HASHES = re.compile(r"^[ \t]*####(?!#)(.*)$", re.MULTILINE)
_ANSWER_IS = re.compile(r"\banswer[*_ \t]{0,4}(?:\bis\b|\bequals\b|[:=])", re.IGNORECASE)
_TAKEN_BACK = re.compile(r"\b(?:wait|sorry|correction|hmm+)\b", re.IGNORECASE)
_STATEMENT_END = re.compile(r"(?<=[^\s.])[.!?;](?:\s|$)|,\s(?:so|since|because|as|which|not)\b")
_BOLD = re.compile(r"\*\*(?=[^\s*])([^*]+)\*\*")
_GOES_ON = re.compile(r"[\s,;(]*(?:or|and)\b|\s*[,;/]\s*[\d$*(\\-]")
"""Behind a statement of which more is to come."""
_MATH = re.compile(r"\$([^$]+)\$|\\\(((?:[^\\]|\\[^()])+)\\\)")
_MAX_CANDIDATES = 64
_WORD = re.compile(r"[A-Za-z]{2,20}[.!]?")
_MAX_LINE = 4000
"""Characters at the end of the last line in which an unmarked answer is looked for."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where the answer was: `text` None means that there is none."""

    text: str | None
    candidates: int = 1
    """Number of different boxes side by side that `text` joins with commas."""


def after_reasoning(response: str) -> str | None:
    """The part of a response behind its last closing think tag; None when a think tag is still open.

    A response without tags, or with a closing tag only (the chat template opened it), is handled alike.
    """
    end = 0
    is_open = False
    for tag in _THINK.finditer(response):
        is_open = not tag.group(1)
        end = tag.end()
    return None if is_open else response[end:]


def closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the one at `start`, or -1. Escaped braces do not count."""
    depth = 0
    position = start
    while position < len(text):
        match text[position]:
            case "\\":
                position += 1
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return position
        position += 1
    return -1


def boxes(text: str) -> list[tuple[int, int, str]] | None:
    """(start, end, content) of every outermost box, in order; None when the last one is unfinished or empty."""
    found: list[tuple[int, int, str]] = []
    position = 0
    while opening := _BOX.search(text, position):
        end = closing_brace(text, opening.end() - 1)
        if end < 0:  # all later text is inside the unfinished box
            return None
        found.append((opening.start(), end + 1, text[opening.end() : end].strip()))
        position = end + 1
    if found and not found[-1][2]:
        return None
    return found


def boxed(text: str) -> Found | None:
    """The last box, joined with different ones that stand right before it; None when the text has no box."""
    found = boxes(text)
    if found is None:
        return Found(None)
    if not found:
        return None
    contents = _side_by_side(found, text, _NO_PROSE)
    answer = ", ".join(contents)
    while (inner := _BOX.match(answer)) and closing_brace(answer, inner.end() - 1) == len(answer) - 1:
        answer = answer[inner.end() : -1].strip()
    return Found(answer or None, len(contents))


def _side_by_side(
    spans: Sequence[tuple[int, int, str]], text: str, between: re.Pattern[str] = _SIDE_BY_SIDE
) -> list[str]:
    """The content of the last span, after the different ones of those with nothing but `between` before it."""
    contents = [spans[-1][2]]
    spans = spans[-_MAX_CANDIDATES:]
    for (_, end, content), (start, _, _) in zip(spans[-2::-1], spans[:0:-1], strict=True):
        if not between.fullmatch(text, end, start):
            break
        if content and content not in contents and not _PLACEHOLDER.fullmatch(content):
            contents.insert(0, content)
    return contents


def final_text(response: str) -> str | None:
    """The last box after the reasoning, else an explicit final statement, else the last non-empty line."""
    text = after_reasoning(response)
    if text is None:
        return None
    if (box := boxed(text)) is not None:
        return box.text
    return _explicit(text) or text.strip().rpartition("\n")[2].strip() or None


def final_answer(response: str) -> Found:
    """The answer of a response to a mathematical task: the last box after the reasoning. Only where there is no box at
    all, the last `<answer>…</answer>`; without such tags an explicit final statement (`#### X`, "the answer is X"), or
    what the last line ends with. Answers that stand side by side are one answer, their list."""
    text = after_reasoning(response)
    if text is None:
        return Found(None)
    if (box := boxed(text)) is not None:
        return box
    if (tagged := _tagged(text)) is not None:
        return tagged
    return Found(_explicit(text) or _end_of_last_line(text))


def gold_answer(gold: str) -> str | None:
    """The answer in a gold, which may hold a whole worked solution; None when it has an unfinished box."""
    if (box := boxed(gold)) is not None:
        return box.text
    return _hashes(gold) or gold.strip() or None


def tagged_answer(response: str) -> str | None:
    """The last `<answer>…</answer>` after the reasoning, else the last box, else the last non-empty line."""
    text = after_reasoning(response)
    if text is None:
        return None
    if (tagged := _last_tagged(text)) is not None:
        return tagged
    if (box := boxed(text)) is not None:
        return box.text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _last_tagged(text: str) -> str | None:
    sections, _ = _sections(text)
    return sections[-1][2] if sections else None


def _tagged(text: str) -> Found | None:
    """The last answer section; nothing in it when one is still open; None when there are no sections."""
    sections, is_open = _sections(text)
    if is_open:
        return Found(None)
    if not sections:
        return None
    contents = _side_by_side(sections, text, _NO_PROSE)
    if len(contents) > 1:
        return Found(", ".join(contents), len(contents))
    stated = None if "\\text" in contents[0] else _explicit(contents[0])
    return Found(stated or contents[0] or None)


def _sections(text: str) -> tuple[list[tuple[int, int, str]], bool]:
    """(start, end, content) of every `<answer>…</answer>`, and whether another one is open."""
    sections: list[tuple[int, int, str]] = []
    opened: re.Match[str] | None = None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag.group(1):
            opened = tag
        elif opened is not None:
            sections.append((opened.start(), tag.end(), text[opened.end() : tag.start()].strip()))
            opened = None
    return sections, opened is not None


def _explicit(text: str) -> str | None:
    """What follows the last `####`, else the last "answer is" that is not taken back."""
    if hashes := _hashes(text):
        return hashes
    taken_back = max((match.end() for match in _TAKEN_BACK.finditer(text)), default=0)
    for match in reversed(list(_ANSWER_IS.finditer(text, taken_back))):
        line = text[match.end() : match.end() + _MAX_LINE].partition("\n")[0]
        if statement := _statement(line):
            return statement
    return None


def _hashes(text: str) -> str | None:
    """What follows the last `####`."""
    lines = [line.strip() for line in _HASHES.findall(text)]
    return lines[-1] or None if lines else None


def _statement(rest: str) -> str:
    """The answer at the start of what follows "the answer is"."""
    rest = rest.strip(" \t:")
    for pattern in (_BOLD, _MATH):
        if (match := pattern.match(rest)) and not _GOES_ON.match(rest, match.end()):
            return next(filter(None, match.groups())).strip()
    return _STATEMENT_END.split(rest, maxsplit=1)[0].strip(" \t*_$")


def _end_of_last_line(text: str) -> str | None:
    """The bold number, else the right-hand side of the last formula, else the last number of the last line, with
    those beside it; a line that is one word or bold as a whole."""
    line = text.strip().rpartition("\n")[2][-_MAX_LINE:]
    for pattern in (_BOLD, _MATH):
        spans = [
            (match.start(), match.end(), next(filter(None, match.groups())).strip())
            for match in pattern.finditer(line)
        ]
        if pattern is _BOLD and any(map(str.isdigit, line)):
            spans = [span for span in spans if any(map(str.isdigit, span[2]))]
        if spans:
            contents = _side_by_side(spans, line)
            if negated(line[: spans[-len(contents)][0]]):
                return None
            if len(contents) > 1:
                return ", ".join(contents)
            return re.split(r"(?<![<>!])=", contents[0])[-1].strip() or None
    return line if _WORD.fullmatch(line) else last_numbers(line)
