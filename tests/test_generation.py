"""A real vLLM engine: what it reports, how it takes new weights, what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from headway.actors.chat import encode
from headway.actors.generation import GenerationActor
from headway.actors.generation_rows import GroupRequest
from headway.actors.samples import SampleRequest
from headway.core import rollouts
from headway.core.config import Config, parse_config
from headway.core.errors import DataError, RolloutFailed, WeightUpdateFailed
from headway.core.prompts import Prompt
from headway.core.sections import Environment
from headway.core.weights import Manifest
from headway.learner.model import PolicyModel
from headway.learner.publish import export, layout_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = {
    "run": {"name": "test-generation", "seed": 3},
    "model": {"dtype": "float32", "chat_template": False},
    "generation": {"threads": 1, "max_model_len": 256},
}
PROMPT = Prompt(prompt_id="p", content="12 + 34 =", gold="46", verifier="numeric")


def relay(agents: dict[str, str]) -> Environment:
    return Environment(name="relay", params={"templates": agents}, agents=tuple(agents), max_turns=1)


def request(
    group_id: int, *, max_new_tokens: int = 60, temperature: float = 1.0, deadline_s: float = 60.0
) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        prompt=PROMPT,
        group_size=4,
        temperature=temperature,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        deadline_s=deadline_s,
    )


class Learner:
    """The weights on the other side."""

    def __init__(self, folder: Path) -> None:
        self.model = PolicyModel(folder, dtype="float32")
        self.plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.layout = layout_of(self.model, "float32", 1 << 20)
        self.version = -1

    def publish(self) -> tuple[Manifest, list[np.ndarray]]:
        self.version += 1
        return export(self.model, self.layout, self.version)

    def step(self) -> None:
        """Changes every weight a little."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.masters.values():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        self.model.refresh()

    @torch.no_grad()
    def greedy(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """The most likely next token, again and again."""
        for name, parameter in self.plain.named_parameters():
            parameter.copy_(self.model.masters[name])
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            ids.append(int(self.plain(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt_ids) :]

    @torch.no_grad()
    def largest_difference(self, table: pa.Table, temperature: float = 1.0) -> float:
        """Between the table's behavior log-probabilities and a plain transformers forward pass."""
        worst = 0.0
        for name, parameter in self.plain.named_parameters():
            parameter.copy_(self.model.masters[name])
        for row in table.to_pylist():
            ids, start = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
            logits = self.plain(torch.tensor([ids])).logits[0, start - 1 : -1].float() / temperature
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
            own = torch.tensor(row["loss_mask"], dtype=torch.bool)
            known = own | ~torch.tensor(row["behavior_logprobs"]).isnan()
            difference = (logprobs - torch.tensor(row["behavior_logprobs"]))[known]
            worst = max(worst, difference.abs().max().item())
        return worst


@pytest.fixture(scope="module")
def config() -> Config:
    return parse_config(CONFIG)


@pytest.fixture(scope="module")
def learner(tiny_random: Path) -> Learner:
    return Learner(tiny_random)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(config: Config, tiny_random: Path, learner: Learner) -> AsyncIterator[GenerationActor]:
    actor = GenerationActor(config, str(tiny_random), 0)
    await actor.start()
    manifest, buckets = learner.publish()
    await actor.update_weights(manifest, *buckets)
    yield actor
    await actor.shutdown()


async def test_engine_and_learner_agree_before_and_after_updates(
    engine: GenerationActor, learner: Learner
) -> None:
    for number in range(3):
        table = await engine.generate(request(100 + number))
        assert learner.largest_difference(table) <= 1e-4
        assert {s["version"] for spans in table["version_spans"].to_pylist() for s in spans} == {
            learner.version
        }
        learner.step()
        manifest, buckets = learner.publish()
        seconds = await engine.update_weights(manifest, *buckets)
        assert await engine.version() == learner.version == manifest.version
        assert set(seconds) == {"fetch", "pause", "load", "total"}


async def test_the_reported_logprobs_are_those_of_the_sampling_temperature(
    engine: GenerationActor, learner: Learner
) -> None:
    table = await engine.generate(request(200, temperature=0.5))
    assert learner.largest_difference(table, temperature=0.5) <= 1e-4
    assert learner.largest_difference(table, temperature=1.0) > 0.1


async def test_rows_hold_exactly_the_sampled_tokens(engine: GenerationActor) -> None:
    table = await engine.generate(request(300, max_new_tokens=200))
    eos = engine._eos_ids
    rows = table.to_pylist()
    assert [row["sample_index"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        ids = row["response_ids"]
        assert len(ids) == len(row["behavior_logprobs"]) == len(row["loss_mask"]) == sum(row["loss_mask"])
        stopped = ids[-1] in eos
        assert not any(token in eos for token in ids[:-1])
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert row["truncated"] == (not stopped) and (stopped or len(ids) == 200)
    assert any(row["finish_reason"] == "stop" for row in rows)  # random weights end sooner or later


async def test_the_same_group_issued_again_gives_the_same_responses(engine: GenerationActor) -> None:
    first, second, other = await asyncio.gather(*(engine.generate(request(g)) for g in (400, 400, 401)))
    assert first["response_ids"] == second["response_ids"]
    assert first["response_ids"] != other["response_ids"]


async def test_a_request_in_flight_carries_both_versions(
    engine: GenerationActor, learner: Learner, under_way: Callable[[GenerationActor], Awaitable[None]]
) -> None:
    before = learner.version
    running = asyncio.gather(*(engine.generate(request(500 + i, max_new_tokens=200)) for i in range(8)))
    await under_way(engine)
    learner.step()
    manifest, buckets = learner.publish()
    await engine.update_weights(manifest, *buckets)
    spans = [spans for table in await running for spans in table["version_spans"].to_pylist()]
    both = [s for s in spans if [span["version"] for span in s] == [before, before + 1]]
    assert both, spans
    assert all(s[0]["end"] == s[1]["start"] for s in both)


async def test_a_tensor_corrupted_on_the_way_is_refused_and_the_old_version_goes_on(
    engine: GenerationActor, learner: Learner
) -> None:
    version = learner.version
    good = await engine.generate(request(700))
    manifest, buckets = learner.publish()
    last = manifest.entries[-1]
    buckets[last.bucket][last.offset + 5] ^= 1
    with pytest.raises(
        WeightUpdateFailed, match=f"version {version + 1}: arrived digests differ for \\['{last.name}'\\]"
    ):
        await engine.update_weights(manifest, *buckets)
    assert await engine.version() == version
    assert (await engine.generate(request(700)))["response_ids"] == good["response_ids"]
    learner.version = version


async def test_an_incomplete_version_is_refused(engine: GenerationActor, learner: Learner) -> None:
    version = learner.version
    manifest, buckets = learner.publish()
    with pytest.raises(WeightUpdateFailed, match="buckets of"):
        await engine.update_weights(manifest, *buckets[:-1])
    wrong = replace(manifest, entries=(replace(manifest.entries[0], digest="0" * 32), *manifest.entries[1:]))
    with pytest.raises(WeightUpdateFailed, match="arrived digests differ"):
        await engine.update_weights(wrong, *buckets)
    assert await engine.version() == version
    learner.version = version


async def test_a_group_that_takes_too_long_is_a_straggler(engine: GenerationActor) -> None:
    with pytest.raises(RolloutFailed, match="straggler"):
        await engine.generate(request(800, max_new_tokens=230, deadline_s=0.02))
    assert (await engine.generate(request(801))).num_rows == 4


async def test_a_greedy_answer_is_the_most_likely_one_and_leaves_the_others_alone(
    engine: GenerationActor, learner: Learner
) -> None:
    ordinary = request(900, temperature=0.5)
    plain = await engine.generate(ordinary)
    table = await engine.generate(replace(ordinary, greedy=True))
    assert table["response_ids"].to_pylist()[:4] == plain["response_ids"].to_pylist()
    greedy = table.to_pylist()[4]
    ids = greedy["response_ids"]
    assert ids == learner.greedy(greedy["prompt_ids"], len(ids))
    assert (greedy["rollout_id"], greedy["sample_index"]) == ("900/greedy", -1)
    assert json.loads(greedy["extra"]) == {"baseline": "greedy"}
    assert greedy["loss_mask"] == [0] * len(ids) and greedy["step_ends"] is None
    assert learner.largest_difference(table.slice(4), temperature=1.0) <= 1e-4
    assert learner.largest_difference(table.slice(0, 4), temperature=0.5) <= 1e-4
    again = await engine.generate(replace(request(901), greedy=True))
    assert again["response_ids"].to_pylist()[4] == ids


async def test_a_sample_continues_exactly_the_tokens_of_its_prefix(
    engine: GenerationActor, learner: Learner
) -> None:
    prefix = [2, 9, 8, 7, 9]
    greedy = SampleRequest(
        name="prefix",
        prefix_ids=prefix,
        seed=1,
        temperature=0.0,
        top_p=1.0,
        max_new_tokens=12,
    )
    whole = await engine.sample(greedy)
    assert whole.ids == learner.greedy(prefix, len(whole.ids))
    first = whole.ids[:3]
    rest = await engine.sample(replace(greedy, prefix_ids=[*prefix, *first], max_new_tokens=9))
    assert [*first, *rest.ids] == whole.ids
    assert rest.version_spans == [{"start": 0, "end": len(rest.ids), "version": learner.version}]
    one, two, other = [await engine.sample(replace(greedy, seed=seed, temperature=1.0)) for seed in (1, 1, 2)]
    assert one == two and one.ids != other.ids
    with pytest.raises(
        RolloutFailed, match=r"prefix: a prompt of 5 tokens and 252 .*max_model_len=256; .* 257"
    ):
        await engine.sample(replace(greedy, max_new_tokens=252))


async def test_branches_start_where_steps_end(engine: GenerationActor) -> None:
    plain = await engine.generate(request(910))
    longest = max(plain.to_pylist(), key=lambda row: len(row["response_ids"]))
    separator = engine._decode(longest["response_ids"][5:7])  # two tokens
    table = await engine.generate(replace(request(910), branches=2, step_separator=separator, max_steps=3))
    rollouts.validate(table)
    rows = table.to_pylist()
    responses, extra = rows[:4], rows[4:]
    assert [row["response_ids"] for row in responses] == plain["response_ids"].to_pylist()
    states = [(None, 0), (None, 0)]
    for row in responses:
        ids = row["response_ids"]
        *inner, last = row["step_ends"]
        assert last == len(ids) and len(inner) <= 2
        found = [engine._decode(ids[:end]).count(separator) for end in range(last)]
        assert inner == [end for end in range(1, last) if found[end] > found[end - 1]][:2]
        states += [(row["sample_index"], end) for end in inner for _ in range(2)]
    ids = longest["response_ids"]
    first = next(end for end in range(1, 8) if separator in engine._decode(ids[:end]))
    assert (longest["sample_index"], first) in states
    assert [(m["row"], m["at"]) for m in (json.loads(row["extra"]) for row in extra)] == states
    assert len({row["rollout_id"] for row in rows}) == len(rows)
    for row, (response, at) in zip(extra, states, strict=True):
        before = responses[response]["response_ids"][:at] if response is not None else []
        assert row["sample_index"] == (-1 if response is None else response)
        assert row["prompt_ids"] == responses[0]["prompt_ids"] + before
        assert 1 <= len(row["response_ids"]) <= 60 - at and not any(row["loss_mask"])
        assert row["truncated"] == (len(row["response_ids"]) == 60 - at and row["finish_reason"] == "length")
        assert row["text"] == engine._decode(before + row["response_ids"])
    assert extra[0]["response_ids"] != extra[1]["response_ids"]


async def test_a_checker_reads_the_solver_of_its_episode(engine: GenerationActor, learner: Learner) -> None:
    agents = {"solver": "{prompt}", "checker": "{prompt} is it {solver} ?"}
    table = await engine.generate(replace(request(920), environment=relay(agents), step_separator="\n"))
    rollouts.validate(table)
    rows = table.to_pylist()
    assert [row["rollout_id"] for row in rows] == [f"920/{e}/{a}" for e in range(4) for a in agents]
    assert [(row["sample_index"], row["agent_id"]) for row in rows] == [
        (e, a) for e in range(4) for a in agents
    ]
    assert all(
        min(row["loss_mask"]) == 1 and row["step_ends"][-1] == len(row["response_ids"]) for row in rows
    )
    for solver, checker in zip(rows[::2], rows[1::2], strict=True):
        asked = replace(PROMPT, content=f"12 + 34 = is it {solver['text']} ?")
        assert solver["prompt_ids"] == encode(engine._tokenizer, PROMPT, chat_template=False)
        assert checker["prompt_ids"] == encode(engine._tokenizer, asked, chat_template=False)
    assert len({tuple(row["prompt_ids"]) for row in rows}) == 5
    assert learner.largest_difference(table) <= 1e-4


GAME = """
from headway.actors.environments import Observation, Outcome


class Game:
    agents = ("policy",)

    def reset(self, prompt):
        self.turns = 0
        return Observation(content=prompt.content)

    def step(self, said):
        self.turns += 1
        return Observation(content=f"{self.turns} + 1 =", reward=0.5) if self.turns < 3 else Outcome()
"""


async def test_turns_of_an_episode_are_sampled_after_the_very_tokens_before_them(
    engine: GenerationActor, learner: Learner, tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text(GAME)
    game = Environment(name=f"{tmp_path / 'game.py'}:Game", max_turns=3)
    table = await engine.generate(replace(request(925), environment=game, max_new_tokens=200))
    rows = table.to_pylist()
    assert len(rows) == 4 and sum(len(row["step_ends"]) for row in rows) > 4
    for row in rows:
        told = [engine._tokenizer.encode(f"{n} + 1 =", add_special_tokens=False) for n in (1, 2)]
        heard = [token for token, own in zip(row["response_ids"], row["loss_mask"], strict=True) if not own]
        assert heard == [token for turn in told[: len(row["step_ends"]) - 1] for token in turn]
        ends = [row["response_ids"][end - 1] in engine._eos_ids for end in row["step_ends"]]
        assert all(ends[:-1]) and ends[-1] != row["truncated"]
    # The same tokens, in one pass of another implementation, give each sampled token the log-probability it had.
    assert learner.largest_difference(table) <= 1e-4


async def test_an_agents_prompt_that_is_too_long_fails_its_group(engine: GenerationActor) -> None:
    agents = {"solver": "{prompt}", "checker": "1" * 200 + "{solver}"}
    with pytest.raises(
        RolloutFailed, match=r"group 930, agent checker: .*max_model_len=256; set it"
    ) as failed:
        await engine.generate(replace(request(930), environment=relay(agents)))
    assert failed.value.reason == "generation_failed"


async def test_metrics_of_the_engine(engine: GenerationActor) -> None:
    updates: dict[tuple[str, str], Any] = {
        (name, label): value for name, label, value in (await engine.report())[2]
    }
    assert updates["headway_engine_version", "0"] == await engine.version()
    assert updates["headway_generation_tokens_total", ""] > 100
    counts, total = updates["headway_weight_sync_seconds", "total"]
    assert sum(counts) >= 5 and total > 0


async def test_prompts_have_one_bos_however_they_come(tiny_random: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_random)
    ids = encode(tokenizer, PROMPT, chat_template=False)
    assert ids.count(tokenizer.bos_token_id) <= 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == PROMPT.content
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert encode(tokenizer, PROMPT, chat_template=True).count(tokenizer.bos_token_id) == 1
    messages = replace(PROMPT, content=({"role": "user", "content": "1 + 1 ="},))
    with pytest.raises(DataError, match="holds chat messages"):
        encode(tokenizer, messages, chat_template=False)
