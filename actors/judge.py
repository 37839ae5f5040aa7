"""A language model that judges: vLLM's asynchronous engine with a fixed model, which completes the verdicts that the
verifier stage has left pending.

Each vote is one answer of the judge. When it does not end with a well-formed verdict within its budget, the verdict line
is begun for the judge and the engine lets it choose only among the rubric's verdicts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from headway.actors.chat import encode, eos_token_ids
from headway.actors.extra_rollouts import fold
from headway.actors.generation_rows import all_of
from headway.actors.generation_traces import Traces, remove_traces
from headway.core.errors import ConfigError, DataError, EngineDead
from headway.core.metrics import Recorder, Update
from headway.core.prompts import Prompt
from headway.core.rollouts import replace_column
from headway.verifiers.composite import combine, expand
from headway.verifiers.extract import after_reasoning
from headway.verifiers.judging import NO_VERDICT, Rubric, judge_messages, read_verdict, rubric_of, settled
from headway.verifiers.pending import pending, with_pending
from headway.verifiers.verdict import Item, Verdict, wrong

TIMEOUT = "judge_timeout"
TOO_LONG = "judge_too_long"
VERDICT_TOKENS = 16
"""For a verdict that is chosen, spelled out character by character if need be."""
CLOSING_TOKENS = 64
"""For what comes between the judge's words and a verdict that is chosen."""
LEAST_CHARS = 200
"""An answer of which no more than this would fit into the judge's prompt is not judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSettings:
    place: str
    """How the names of all engines of this run begin on a host."""
    dtype: str = "bfloat16"
    seed: int = 0
    max_model_len: int = 8192
    """Tokens of the judge's prompt and answer. Of a response that does not fit the middle is left out."""
    max_new_tokens: int = 1024
    """Of one answer; 0: the verdict at once, without reasons."""
    force_verdict: bool = True
    """Choose a verdict where the answer ends without one; off: the response stays unscored."""
    votes: int = 1
    """Answers per response."""
    vote: Literal["mean", "majority"] = "mean"
    """What several votes come to; the majority of equally frequent scores is the lowest."""
    temperature: float = 0.0
    """0: greedy; at most 2."""
    max_response_chars: int = 20_000
    """Of a longer response the middle is left out."""
    deadline_s: float = 300.0
    """A vote that takes longer, its wait for the engine included, leaves its response unscored (seconds)."""
    max_concurrent_requests: int = 64
    gpus: float = 0.0
    threads: int | None = None
    """Cores on CPUs; null: all."""
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float = 1.0
    """On CPUs."""

    def __post_init__(self) -> None:
        if self.votes > 1 and self.temperature == 0:
            raise ConfigError(
                "several votes of a greedy judge are all the same; raise its temperature above 0"
            )
        if not 0 <= self.temperature <= 2:
            raise ConfigError(f"the judge's temperature={self.temperature} is not between 0 and 2")
        if self.max_new_tokens == 0 and not self.force_verdict:
            raise ConfigError("a judge without new tokens and without a forced verdict never gives one")
        if self.room < 1:
            raise ConfigError(
                f"the judge's max_new_tokens={self.max_new_tokens} leave no room for a prompt in its max_model_len="
                f"{self.max_model_len}"
            )

    @property
    def room(self) -> int:
        """Tokens of its prompt."""
        return self.max_model_len - self.max_new_tokens - CLOSING_TOKENS - VERDICT_TOKENS


class JudgeActor:
    """A plain class; whoever runs it decides where. `start` must have returned before `score`."""

    def __init__(self, settings: JudgeSettings, model_folder: str, replica: int) -> None:
        self._settings = settings
        self._model_folder = model_folder
        self._replica = replica
        self._recorder = Recorder()
        self._traces = Traces(f"{settings.place}judge{replica}")
        self._numbers = count()

    async def start(self) -> None:
        """Starts the engine. What a killed actor of this run has left on the host is removed first. Raises `DataError`
        for a model without a chat template."""
        settings = self._settings
        _environment(settings, self._replica, self._traces.folder)
        from transformers import AutoTokenizer
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        self._tokenizer: Any = AutoTokenizer.from_pretrained(self._model_folder)
        if not self._tokenizer.chat_template:
            raise DataError(f"judge {self._model_folder} has no chat template; it must be a chat model")
        self._eos_ids = eos_token_ids(Path(self._model_folder), self._tokenizer)
        self._special_tokens = special_tokens(self._tokenizer)
        self._opening = "<think>" if opens_reasoning(self._tokenizer) else ""
        on_cpu = current_platform.is_cpu()
        remove_traces(settings.place)
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=self._model_folder,
                dtype=settings.dtype,  # pyright: ignore[reportArgumentType]
                seed=settings.seed,
                enforce_eager=on_cpu,
                tensor_parallel_size=max(1, int(settings.gpus)),
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

    async def score(self, table: pa.Table, prompt: Prompt) -> pa.Table:
        """The rollout table with `reward`, `reward_parts`, `verdict_reason` and `timing.scored` filled in where a verdict
        was pending in `extra`, and taken out there; other rows stay. Extra rows are then folded into `values`
        (`extra_rollouts.fold`).

        Unscored responses have reason `judge_no_verdict`, `judge_timeout`, `judge_too_long` (its prompt), or `bad_gold`
        (the rubric is no good). Raises `EngineDead`.
        """
        rows = table.select(
            ["rollout_id", "text", "extra", "reward", "reward_parts", "verdict_reason", "timing"]
        ).to_pylist()
        left = {number: leaves for number, row in enumerate(rows) if (leaves := pending(row["extra"]))}
        if left:
            results = await all_of(self._row(prompt, rows[number], leaves) for number, leaves in left.items())
            now = time.time()
            for number, verdict in zip(left, results, strict=True):
                row = rows[number]
                row["reward"], row["verdict_reason"] = verdict.score, verdict.reason
                parts = [{"name": name, "value": value} for name, value in verdict.parts]
                row["reward_parts"] = [*(row["reward_parts"] or ()), *parts]
                row["extra"] = with_pending(row["extra"], None)
                row["timing"] = {**(row["timing"] or {}), "scored": now}
            for name in ("reward", "reward_parts", "verdict_reason", "extra", "timing"):
                table = replace_column(table, name, [row[name] for row in rows])
        return fold(table)

    async def _row(self, prompt: Prompt, row: dict[str, Any], leaves: Sequence[Verdict | None]) -> Verdict:
        """The verdict on one response, from those on its leaves."""
        started = time.monotonic()
        answer = json.loads(row["extra"] or "{}").get(
            "answer", row["text"]
        )  # of an episode what it said last
        item = Item(prompt.verifier, prompt.gold, answer, prompt.context, prompt.text)
        parts = expand(item)
        judged = iter(
            await all_of(
                self._leaf(part, f"{row['rollout_id']}/{number}")
                for number, (part, known) in enumerate(zip(parts, leaves, strict=True))
                if known is None
            )
        )
        verdict = combine(item, [next(judged) if known is None else known for known in leaves])
        self._recorder.observe("headway_verifier_seconds", [time.monotonic() - started])
        if verdict.score is None:
            self._recorder.inc("headway_verifier_errors_total", label=verdict.reason)
        return verdict

    async def _leaf(self, item: Item, name: str) -> Verdict:
        """What the votes on one response come to."""
        try:
            rubric = rubric_of(item.context)
        except DataError as error:
            return Verdict(score=None, reason="bad_gold", extracted=str(error))
        prompt_ids = self._prompt_ids(item, rubric)
        if isinstance(prompt_ids, Verdict):
            return prompt_ids
        seeds = [_seed(self._settings.seed, name, vote) for vote in range(self._settings.votes)]
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
            raise EngineDead(f"judge {self._replica}") from error

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
        chosen, _ = await self._ask([*prompt_ids, *ids, *closing], VERDICT_TOKENS, seed, choice)
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
            self._engine.shutdown()
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


def _environment(settings: JudgeSettings, replica: int, folder: Path) -> None:
    """vLLM reads these when it is imported, and in its processes. `folder` is for their sockets."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only, and it would win over `kv_cache_gib`
    if threads := settings.threads:
        cores = sorted(os.sched_getaffinity(0))
        mine = {cores[(replica * threads + number) % len(cores)] for number in range(threads)}
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(mine)))
