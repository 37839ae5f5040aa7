"""The answer is JSON: valid against a schema, and equal to the gold as data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headway.core.errors import DataError
from headway.verifiers.extract import after_reasoning
from headway.verifiers.tags import answer_section
from headway.verifiers.verdict import Verdict, correct, wrong

MAX_ATTEMPTS = 1000
"""Brackets that open no JSON, up to which an object or array is looked for."""

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*$", re.MULTILINE)
_OPENING = re.compile(r"""\{(?=\s*["}])|\[(?=\s*[\]\[{"\d\-tfn])""")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class _Malformed(ValueError):
    """The text is not JSON by RFC 8259 with unique names, or holds a number that is not finite."""


class _TooLarge(Exception):
    """The text has too many brackets to look for JSON in it."""


def json_schema(prompt: str, gold: Any, response: str, context: Mapping[str, Any]) -> Verdict:
    """1 when the answer is JSON, valid against `schema` of the context where there is one, and the same data as the
    gold where there is one. At least one of them is needed. Both may be JSON texts; a text gold always is one.

    The answer is what stands after the reasoning (in the last `<answer>` section where there is one): the whole of it,
    else the last block fenced as json, else the last object or array; one that is cut off is no answer. Objects with
    the same name twice, NaN and infinities are malformed. Equal data: 1 is 1.0 but not true, and the order of names
    does not matter. `format` in a schema is not checked, and references to other documents are never fetched. Raises
    `DataError` for a schema that is none, and for a gold that does not follow it.
    """
    schema = context.get("schema")
    if schema is None and gold is None:
        raise DataError("json_schema needs schema in the context, or a gold")
    if isinstance(schema, str):
        schema = _given("schema", schema)
    validator = None if schema is None else _validator(_text("schema", schema))
    expected = _given("gold", gold if isinstance(gold, str) else _text("gold", gold))
    try:
        if gold is not None and validator is not None and not validator.is_valid(expected):
            raise DataError(f"gold {gold!r} is not valid against its schema")
    except RecursionError as error:
        raise DataError("the gold or its schema is nested too deeply") from error
    visible = after_reasoning(response)
    if visible is not None and (section := answer_section(visible)) is not None:
        visible = section.text
    answer: str | None = None
    try:
        answer = json_text(visible) if visible else None
        if answer is None:
            return wrong(None, "no_answer")
        data = _strict(answer)
        if validator is not None and not validator.is_valid(data):
            return wrong(answer, "schema")
        return correct(answer) if gold is None or same_data(data, expected) else wrong(answer)
    except _Malformed:
        return wrong(answer, "malformed")
    except (RecursionError, _TooLarge):
        return wrong(None, "too_large")


def present(gold: Any, context: Mapping[str, Any]) -> tuple[str, ...]:
    """The gold as a response. Raises `DataError`."""
    return () if gold is None else (gold if isinstance(gold, str) else _text("gold", gold),)


def json_text(text: str) -> str | None:
    """The JSON in a text, unparsed: all of it, the last block fenced as json, or the last object or array."""
    text = text.strip()
    if text and text[0] in '{["-0123456789tfn':
        try:
            if json.JSONDecoder().raw_decode(text)[1] == len(text):
                return text
        except ValueError:
            pass
    block: str | None = None
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None or fence[1]:
            opening = fence
            continue
        if _is_json(opening):
            block = text[opening.end() : fence.start()].strip()
        opening = None
    if opening is not None and _is_json(opening):  # cut off
        return None
    return _last_container(text) if block is None else block or None


def same_data(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0 but not true."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_data(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same_data, left, right))
    return left == right


def _is_json(fence: re.Match[str]) -> bool:
    return fence[1].lower() == "json"


def _last_container(text: str) -> str | None:
    """The last object or array of a text, None if that one is cut off. Every character is read at most twice, but
    for those that a failed attempt counts to tell its line."""
    found: str | None = None
    position = 0
    attempts = 0
    while opening := _OPENING.search(text, position):
        start = opening.start()
        try:
            _, position = json.JSONDecoder().raw_decode(text, start)
            found = text[start:position]
        except json.JSONDecodeError as error:
            if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
                return None
            position = max(start + 1, error.pos)
            attempts += 1
            if attempts == MAX_ATTEMPTS:
                raise _TooLarge from error
        except ValueError as error:  # a number of thousands of digits
            raise _Malformed from error
    return found


def _strict(text: str) -> Any:
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=int
        )
    except ValueError as error:
        raise _Malformed from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Malformed("a name stands twice")
    return found


def _no_constant(name: str) -> Any:
    raise _Malformed(name)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _Malformed(text)
    return number


def _given(key: str, text: str) -> Any:
    try:
        return _strict(text)
    except (_Malformed, RecursionError) as error:
        raise DataError(f"{key} {text[:200]!r} is not JSON: {error.__cause__ or error}") from error


def _text(key: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{key} is not JSON data: {error}") from error


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    """A validator that knows the published meta-schemas and fetches nothing."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    contents = json.loads(schema)
    if not isinstance(contents, dict | bool):
        raise DataError(f"schema {schema[:200]} is neither an object nor true or false")
    kind: Any = Draft202012Validator
    if isinstance(contents, dict) and (named := contents.get("$schema")) is not None:
        kind = validator_for(contents) if isinstance(named, str) else kind
        if not isinstance(named, str) or kind.META_SCHEMA["$schema"].rstrip("#") != named.rstrip("#"):
            raise DataError(f"schema: $schema {named!r} is no published draft")
    try:
        kind.check_schema(contents)
        resource = Resource.from_contents(contents, default_specification=DRAFT202012)
        _check_all(REGISTRY.resolver_with_root(resource), resource)
    except SchemaError as error:
        raise DataError(f"schema {schema[:200]} is not a JSON schema: {error.message}") from error
    except Unresolvable as error:
        raise DataError(f"schema {schema[:200]} refers to what it does not hold: {error}") from error
    except (RecursionError, re.error) as error:
        raise DataError(f"schema {schema[:200]} cannot be used: {error}") from error
    return kind(contents, registry=REGISTRY)


def _check_all(resolver: Any, resource: Any) -> None:
    """Raises `Unresolvable` for a reference that leads nowhere and `re.error` for a pattern that is none, however
    seldom a response would reach it."""
    schema = resource.contents
    if isinstance(schema, dict):
        for key in _REFERENCES:
            if isinstance(reference := schema.get(key), str):
                resolver.lookup(reference)
        for pattern in (schema.get("pattern"), *schema.get("patternProperties", ())):
            if pattern is not None:
                re.compile(pattern)
    for inner in resource.subresources():
        _check_all(resolver.in_subresource(inner), inner)
