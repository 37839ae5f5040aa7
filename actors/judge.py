"""A language model that judges: vLLM's asynchronous engine with a fixed model, which completes the verdicts that the
verifier stage has left pending.

Each vote is one answer of the judge. When it does not end with a well-formed verdict within its budget, the verdict line
is begun for the judge and the engine lets it choose only among the rubric's verdicts.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from headway.actors.chat import encode, eos_token_ids
from headway.actors.extra_rollouts import fold
from headway.actors.generation_rows import all_of
from headway.actors.generation_traces import Traces, places, prepare, remove_traces
from headway.actors.later_verdicts import leaves, settle
from headway.core.config import Config
from headway.core.errors import ConfigError, DataError, EngineDead
from headway.core.metrics import Recorder, Update
from headway.core.prompts import Prompt
from headway.core.sections import JUDGE_VERDICT_TOKENS
from headway.verifiers.composite import expand
from headway.verifiers.extract import after_reasoning
from headway.verifiers.golds import MEANINGLESS
from headway.verifiers.judging import (
    JUDGE,
    NO_VERDICT,
    Rubric,
    judge_messages,
    read_verdict,
    rubric_of,
    settled,
)
from headway.verifiers.verdict import Item, Verdict, wrong

TIMEOUT = "judge_timeout"
TOO_LONG = "judge_too_long"
LEAST_CHARS = 200
"""An answer of which no more than this would fit into the judge's prompt is not judged."""


class JudgeActor:
    """`judge.model` must be a folder by now. `start` must have returned before `score`."""

    def __init__(self, config: Config, replica: int) -> None:
        self._config = config
        self._settings = config.judge
        self._replica = replica
        self._recorder = Recorder()
        self._traces = Traces(f"{places(config)}judge{replica}")
        self._numbers = count()

    async def start(self, known: Sequence[Prompt] = ()) -> None:
        """Starts the engine, and tries it on prompts whose golds are answers. What a killed actor of this run has left
        on the host is removed first. Raises `DataError` for a model without a chat template, and for one that does not
        rate the golds of `known` above a meaningless answer."""
        settings = self._settings
        folder = settings.model
        if folder is None:
            raise ConfigError("judge.model is null: there is no model to judge with")
        prepare(self._traces.folder, settings.threads, self._replica, sorted(os.sched_getaffinity(0)))
        from transformers import AutoTokenizer
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if not self._tokenizer.chat_template:
            raise DataError(f"judge.model={folder} has no chat template; it must be a chat model")
        self._eos_ids = eos_token_ids(Path(folder), self._tokenizer)
        self._special_tokens = special_tokens(self._tokenizer)
        self._opening = "<think>" if opens_reasoning(self._tokenizer) else ""
        on_cpu = current_platform.is_cpu()
        remove_traces(places(self._config))
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=folder,
                dtype=settings.dtype,  # pyright: ignore[reportArgumentType]
                seed=self._config.run.seed,
                enforce_eager=on_cpu,
                tensor_parallel_size=(size := max(1, int(settings.gpus))),
                # By itself it would start its workers through Ray, in the placement group, all of which this actor has.
                distributed_executor_backend="mp" if size > 1 else None,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_concurrent_requests,
                # A seeded request whose prefill is split rewinds its generator, which CPU generators cannot do.
                enable_chunked_prefill=False if on_cpu else None,
                max_num_batched_tokens=max(2048, settings.max_model_len) if on_cpu else None,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                kv_cache_memory_bytes=int(settings.kv_cache_gib * 2**30) if on_cpu else None,
                enable_prefix_caching=True,  # responses to one prompt are judged one after another
                disable_log_stats=True,
            )
        )
        self._traces.note()
        await self._try(known)

    async def _try(self, known: Sequence[Prompt]) -> None:
        async def points(prompt: Prompt, response: str) -> float:
            item = Item(prompt.verifier, prompt.gold, response, prompt.context, prompt.text)
            own = [leaf for leaf in expand(item) if leaf.name == JUDGE]
            return sum(v.score or 0.0 for v in await all_of(self._leaf(leaf, "known") for leaf in own))

        golds = sum(await all_of(points(prompt, str(prompt.gold)) for prompt in known))
        others = sum(await all_of(points(prompt, MEANINGLESS) for prompt in known))
        if known and golds <= others:
            raise DataError(
                f"judge.model={self._settings.model} gives the golds of {len(known)} prompts {golds:g} points in all, and "
                f"the meaningless answer {MEANINGLESS} {others:g}: it cannot judge them; choose another model or rubric"
            )

    async def score(self, table: pa.Table, prompt: Prompt) -> pa.Table:
        """The rollout table with `reward`, `reward_parts`, `verdict_reason` and `timing.scored` filled in where a verdict
        was pending in `extra`, and taken out there; other rows stay. Extra rows are then folded into `values`
        (`extra_rollouts.fold`), unless the reward model sees them next.

        Unscored responses have reason `judge_no_verdict`, `judge_timeout`, `judge_too_long` (its prompt), or `bad_gold`
        (the rubric is no good). Raises `EngineDead`.
        """
        own = leaves(table, prompt, JUDGE)
        if own:
            ids = table["rollout_id"].to_pylist()
            verdicts = await all_of(self._leaf(leaf.item, f"{ids[leaf.row]}/{leaf.number}") for leaf in own)
            found = {(leaf.row, leaf.number): verdict for leaf, verdict in zip(own, verdicts, strict=True)}
            table, settled = settle(table, prompt, found)
            for verdict in settled:
                if verdict.score is None:
                    self._recorder.inc("headway_verifier_errors_total", label=verdict.reason)
        return fold(table) if self._config.reward_model.path is None else table

    async def _leaf(self, item: Item, name: str) -> Verdict:
        """What the votes on one response come to."""
        try:
            rubric = rubric_of(item.context)
        except DataError as error:
            return Verdict(score=None, reason="bad_gold", extracted=str(error))
        prompt_ids = self._prompt_ids(item, rubric)
        if isinstance(prompt_ids, Verdict):
            return prompt_ids
        seeds = [_seed(self._config.run.seed, name, vote) for vote in range(self._settings.votes)]
        votes = await all_of(self._in_time(prompt_ids, rubric, seed) for seed in seeds)
        return settled(votes, self._settings.vote)

    def _prompt_ids(self, item: Item, rubric: Rubric) -> list[int] | Verdict:
        """The judge's prompt, or the verdict on a response that needs or gets no judge."""
        chars = self._settings.max_response_chars
        while chars >= LEAST_CHARS:
            messages = judge_messages(
                item.prompt,
                item.gold,
                item.response,
                rubric,
                special_tokens=self._special_tokens,
                max_chars=chars,
            )
            if messages is None:
                return wrong(None, "no_answer")
            asked = Prompt(prompt_id=item.name, content=tuple(messages), gold=None, verifier=item.name)
            ids = encode(self._tokenizer, asked, chat_template=True)
            if len(ids) <= self._settings.room:
                return ids
            chars = min(chars, len(item.response)) // 2
        return Verdict(score=None, reason=TOO_LONG)

    async def _in_time(self, prompt_ids: list[int], rubric: Rubric, seed: int) -> Verdict:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async with asyncio.timeout(self._settings.deadline_s):
                return await self._vote(prompt_ids, rubric, seed)
        except TimeoutError:
            return Verdict(score=None, reason=TIMEOUT)
        except EngineDeadError as error:
            raise EngineDead("judge", self._replica) from error

    async def _vote(self, prompt_ids: list[int], rubric: Rubric, seed: int) -> Verdict:
        settings = self._settings
        ids: list[int] = []
        text = self._opening
        if settings.max_new_tokens:
            ids, ended = await self._ask(prompt_ids, settings.max_new_tokens, seed)
            text += self._tokenizer.decode(ids, skip_special_tokens=False)
            # What was cut off may end anywhere, for example with words that it quotes.
            verdict = read_verdict(text, rubric) if ended else None
            if verdict is not None and verdict.score is not None:
                return verdict
        if not settings.force_verdict:
            return Verdict(score=None, reason=NO_VERDICT)
        end = "\n</think>" if after_reasoning(text) is None else ""
        closing = self._tokenizer(f"{end}\n\nVerdict:", add_special_tokens=False)["input_ids"]
        choice = [f" {answer}" for answer in rubric.answers]
        chosen, _ = await self._ask([*prompt_ids, *ids, *closing], JUDGE_VERDICT_TOKENS, seed, choice)
        return read_verdict(f"Verdict: {self._tokenizer.decode(chosen).strip()}", rubric)

    async def _ask(
        self, prompt_ids: list[int], max_tokens: int, seed: int, choice: list[str] | None = None
    ) -> tuple[list[int], bool]:
        """What the engine samples, without the token that ends it, and whether there was one; only one of `choice` where
        that is given."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        params = SamplingParams(
            temperature=self._settings.temperature,
            max_tokens=max_tokens,
            seed=seed if self._settings.temperature else None,
            stop_token_ids=self._eos_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=StructuredOutputsParams(choice=choice) if choice else None,
        )
        ids: list[int] = []
        number = str(next(self._numbers))
        async for output in self._engine.generate({"prompt_token_ids": prompt_ids}, params, number):
            ids = list(output.outputs[0].token_ids)
        ended = bool(ids) and ids[-1] in self._eos_ids
        return (ids[:-1] if ended else ids), ended

    async def drain_updates(self) -> list[Update]:
        """Metric updates since the last call."""
        return self._recorder.drain()

    async def ping(self) -> bool:
        """True while the engine's processes answer."""
        await self._engine.check_health()
        return True

    async def shutdown(self) -> None:
        """Ends the engine's processes and removes their files."""
        if hasattr(self, "_engine"):
            self._engine.shutdown(timeout=0)
            del self._engine  # its finaliser needs modules that are gone at interpreter exit
        self._traces.remove()


def special_tokens(tokenizer: Any) -> list[str]:
    """What this tokenizer reads as more than text: its special tokens, and others that it was given and that look like
    tags. The longest first."""
    added = [token for token in tokenizer.get_added_vocab() if token.startswith("<")]
    found = {token for token in (*tokenizer.all_special_tokens, *added) if len(token.strip()) > 1}
    return sorted(found, key=lambda token: (-len(token), token))


def opens_reasoning(tokenizer: Any) -> bool:
    """Whether the chat template itself writes the tag that begins the model's reasoning."""
    probe = "A5F0"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": probe}], tokenize=False, add_generation_prompt=True
    )
    return after_reasoning(text.rpartition(probe)[2]) is None


def _seed(run_seed: int, name: str, vote: int) -> int:
    """The same vote for the same response, however often and wherever it is judged."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{name}/{vote}".encode(), digest_size=7).digest())
