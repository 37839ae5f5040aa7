"""The answer is one of several lettered options."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Mapping
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.extract import after_reasoning, boxed, gold_answer
from headway.verifiers.tags import answer_section
from headway.verifiers.verdict import Verdict, correct, wrong

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_UNNAMED = "ABCDEFGHIJ"
"""The letters that are options where the context names none."""
_MAX_TEXT = 4000
"""Characters in which an answer is looked for."""

_STATED = re.compile(
    r"(?:\banswers?|\boption|\bchoice)[*_ \t]{0,4}(?:\b(?:is|are|equals|(?:would|must|should|will|has to) be)\b|[:=])([^\n]*)"
    r"|^[ \t]*####(?!#)([^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_RETRACTED = re.compile(r"\b(?:wait|sorry|correction|hmm+)\b", re.IGNORECASE)
_BOLD = re.compile(r"\*\*(?=[^\s*])([^*\n]{1,500})\*\*")
_WRAPPER = re.compile(r"\\(?:text[a-z]*|math[a-z]+|boldsymbol|mbox)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"\\[()\[\],;: ]|[$*`]|(?<!\w)_|_(?!\w)")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+")
_LETTER = re.compile(
    r"(?:(?:the|option|choice|answer|letter)\s+)*[(\[]?\s*([A-Za-z])\s*[)\]]?[.:,;!]*", re.IGNORECASE
)
_LABELLED = re.compile(r"(?:[(\[]\s*([A-Za-z])\s*[)\]]|([A-Z])\s*[).:,(–—-])\s*[.:–—-]?\s*(\S.*)")
_LETTERED = re.compile(r"(.*\S)\s*[(\[]([A-Za-z])[)\]][.!]?")
_LABELS = re.compile(r"(?:^|[,;.]\s*|\b(?:and|or)\s+)[(\[]?([A-Z])[.):\]]{1,2}\s*(?=\w)")
_REASON = re.compile(r"[\s,(]*\b(?:because|since|as|due to|given)\b.*", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:not|neither|nor|none|never|cannot|wrong|incorrect|false|impossible|unlikely|except|eliminat\w*|exclud\w*"
    r"|rul(?:e|es|ed|ing) out|ruled|rather|instead|unlike)\b|n['’]t\b",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")
_NAMING = frozenset({"option", "choice", "answer", "letter"})
_LEADS = frozenset({
    "so", "thus", "hence", "therefore", "then", "is", "are", "be", "choose", "chose", "pick", "picked", "select",
    "selected", "with", "say", "to", "go", "guess",
})  # fmt: skip
_JOINS = frozenset({"and", "or", "both", "either", "between"})
_VERBS = frozenset({"is", "was", "are", "and", "or", "seems", "must", "matches", "fits"})


def choice(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 when the response chooses the gold's option, by its letter or by its whole text.

    `choices` of the context: the options, a list of texts (A, B, …) or {letter: text}; without them only letters are
    understood. The gold is a letter (`C`, `(C)`, `C. Paris`, boxed) or the text of one option. Raises `DataError`.

    The choice is in the last `<answer>` section or box after the reasoning; without them it is what the last "answer
    is" (or "option is", `####`) says; without that, what bold texts and the last line say together; and where they say
    nothing, a first line that is one option and no more. Claims are not weighed: a sentence that denies something
    chooses nothing, so "A is wrong, so C" does not, while "A is wrong, so the answer is C" chooses C. Several options,
    a letter beside another option's text, and a statement that is taken back ("wait") are ambiguous. A letter inside a
    word, an article and what is denied are no choice.
    """
    options = _options(context)
    expected = _gold(gold, options)
    visible = after_reasoning(response)
    if visible is None:
        return wrong(None, "no_answer")
    letters, text = _Reader(options, expected).answer(visible.rstrip())
    if not letters:
        return wrong(text, "no_answer" if text is None else "wrong")
    if len(letters) > 1:
        return wrong(text, "ambiguous")
    (letter,) = letters
    return correct(letter) if letter == expected else wrong(letter)


class _Reader:
    """Finds the letters that a text chooses."""

    def __init__(self, options: Mapping[str, str], expected: str) -> None:
        self.letters = frozenset(options or _UNNAMED) | {expected}
        self.texts = {letter: _plain(text) for letter, text in options.items()}

    def answer(self, visible: str) -> tuple[set[str], str | None]:
        """The chosen letters, and the text in which an answer was marked."""
        section = answer_section(visible)
        if section is not None and section.text is None:
            return set(), None
        scope = visible if section is None else section.text or ""
        if (box := boxed(scope)) is not None:
            return (self.statement(box.text), box.text) if box.text else (set(), None)
        if section is not None and (letters := self.statement(scope)):
            return letters, scope
        letters = self.unmarked(scope)
        return letters, scope[-_MAX_TEXT:] if letters or section is not None else None

    def unmarked(self, scope: str) -> set[str]:
        for stated in deque(_STATED.finditer(scope), maxlen=1):
            statement = next(filter(None, stated.groups()), "")
            if letters := self.statement(statement):
                taken_back = _RETRACTED.search(scope, stated.start())
                return letters | set(self.letters) if taken_back else letters
        letters: set[str] = set()
        lines = scope.splitlines()
        for line in lines:
            if "**" in line and not _DENIED.search(line):
                for bold in _BOLD.findall(line):
                    letters |= self.statement(bold)
        last = next(filter(None, (_plain(line[-_MAX_TEXT:]) for line in reversed(lines))), "")
        sentences = _SENTENCE_END.split(last)
        letters |= self.whole(last) or set().union(*(self.whole(s) or self.sentence(s) for s in sentences))
        if (label := _LABELLED.match(last)) and _letter_of(label) in letters:
            # one line of a list of all options is no choice
            labels = (_LABELLED.match(_plain(line[:_MAX_TEXT])) for line in lines)
            letters |= {_letter_of(label) for label in labels if label} & self.letters
        if not letters and not _RETRACTED.search(scope):  # the choice first, then why
            first = next(filter(None, (_plain(line[:_MAX_TEXT]) for line in lines)), "")
            letters = self.whole(first) or self.labelled(first)
        return letters

    def statement(self, text: str) -> set[str]:
        """What the first sentence says, together with letters and texts of options right behind it."""
        text = _plain(text[:_MAX_TEXT])
        if letters := self.whole(text) or self.labelled(text):
            return letters
        labels = {label for label in _LABELS.findall(text) if label in self.letters}
        if len(labels) > 1:
            return labels
        first, *others = _SENTENCE_END.split(text)
        letters = self.whole(first) or self.sentence(first)
        for sentence in others:
            more = self.whole(sentence)
            if not more:
                break
            letters |= more
        return letters

    def whole(self, text: str) -> set[str]:
        """The option that the text is, by letter or by text."""
        found = _LETTER.fullmatch(text)
        letter = found[1].upper() if found else ""
        if letter in self.letters:
            return {letter}
        same = {letter for letter, option in self.texts.items() if option == text.rstrip(".")}
        if not same:
            folded = text.rstrip(".").casefold()
            same = {letter for letter, option in self.texts.items() if option.casefold() == folded}
        return same or ({letter} if letter else set())

    def labelled(self, text: str) -> set[str]:
        """The letter and the option of "C. Paris", "C (Paris)" or "Paris (C)"; nothing where no option's text or letter
        stands beside the letter."""
        if found := _LABELLED.fullmatch(text):
            letter, beside = _letter_of(found), found[3]
        elif found := _LETTERED.fullmatch(text):
            letter, beside = found[2].upper(), found[1]
        else:
            return set()
        named = self.whole(beside) or self.whole(beside.rstrip(")."))
        return named | {letter} if named and letter in self.letters else set()

    def sentence(self, text: str) -> set[str]:
        if letters := self.labelled(text):
            return letters
        text = _REASON.sub("", text)
        if denied := _DENIED.search(text):
            head = _LETTER.fullmatch(text[: denied.start()].strip(" ,;:–—-("))
            return {head[1].upper()} & self.letters if head else set()
        named, chosen = self.mentions(text)
        return named if len(named) > 1 else chosen

    def mentions(self, text: str) -> tuple[set[str], set[str]]:
        """The letters that stand as options, and those among them that are not joined to what stands before."""
        named: set[str] = set()
        chosen: set[str] = set()
        tokens = list(_TOKEN.finditer(text))
        words = ["", "", *(token.group() for token in tokens), ""]
        is_after_letter = False
        for token, second, before, word, after in zip(
            tokens, words, words[1:], words[2:], words[3:], strict=False
        ):
            letter = word.upper()
            is_called = text[: max(0, token.start() - 1)][-1:].isalnum()  # f(a)
            is_bracketed = before in ("(", "[") and after in (")", "]") and not is_called
            lead = (second if is_bracketed else before).lower()
            is_bare = word.isupper() and not _is_article(word, after) and "=" not in (before, after)
            is_option = letter in self.letters and (
                is_bracketed or lead in _NAMING or (is_bare and (is_after_letter or _may_precede(lead)))
            )
            if is_option:
                named.add(letter)
                if lead not in _JOINS:
                    chosen.add(letter)
            is_after_letter = is_option
        return named, chosen


def _is_article(word: str, after: str) -> bool:
    """Whether it is the word A or I."""
    return word in ("A", "I") and after[:1].islower() and after not in _VERBS


def _may_precede(word: str) -> bool:
    """Whether a bare letter after this word, or at the start, is an option: it is not in "vitamin C" or "25 °C"."""
    if not word or word in _LEADS or word in _JOINS:
        return True
    return word.endswith(("ly", "'s", "’s")) or (not word[0].isalnum() and word != "°")


def _letter_of(labelled: re.Match[str]) -> str:
    return (labelled[1] or labelled[2]).upper()


def _plain(text: str) -> str:
    """One line without markup."""
    text = _WRAPPER.sub(r" \1 ", unicodedata.normalize("NFKC", text))
    return " ".join(_MARKUP.sub(" ", text).split()).strip("\"'“”‘’")


def _options(context: Mapping[str, Any]) -> dict[str, str]:
    """Texts by letter. Raises `DataError`."""
    given = context.get("choices")
    if given is None:
        return {}
    if isinstance(given, list | tuple):
        if not 2 <= len(given) <= len(LETTERS):
            raise DataError(f"choices: {len(given)} options are not 2 to {len(LETTERS)}")
        given = dict(zip(LETTERS, given, strict=False))
    if not isinstance(given, Mapping):
        raise DataError(f"choices {given!r} is neither a list of texts nor {{letter: text}}")
    options: dict[str, str] = {}
    for label, text in given.items():
        if text is None:  # a letter of other rows of the same table
            continue
        letter = label.strip("()[]. ").upper() if isinstance(label, str) else ""
        if len(letter) != 1 or letter not in LETTERS or letter in options:
            raise DataError(f"choices: {label!r} is not one letter for one option")
        if isinstance(text, bool) or not isinstance(text, str | int | float) or not _plain(str(text)):
            raise DataError(f"choices: option {letter} {text!r} is not a text")
        options[letter] = str(text)
    if len(options) < 2:
        raise DataError(f"choices {given!r} holds fewer than two options")
    return {letter: text.rstrip(". ") or text for letter, text in options.items()}


def _gold(gold: Any, options: Mapping[str, str]) -> str:
    """The letter. Raises `DataError`."""
    if not isinstance(gold, str) or (answer := gold_answer(gold)) is None:
        raise DataError(f"gold {gold!r} is neither a letter nor the text of an option")
    text = _plain(answer)
    reader = _Reader(options, next(iter(options), "A"))
    letters = reader.whole(text)
    if not letters and (labelled := re.fullmatch(r"[(\[]?([A-Za-z])[)\].:](?:\s*[.:–—-])?\s*(\S.*)", text)):
        letters = {labelled[1].upper()} | reader.whole(labelled[2])
    if len(letters) != 1 or not letters <= set(options or LETTERS):
        among = f"the options {', '.join(options)}" if options else "the letters A to Z"
        raise DataError(f"gold {gold!r} is not exactly one of {among}, by letter or by text")
    return next(iter(letters))
