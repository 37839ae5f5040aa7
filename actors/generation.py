"""One generation engine: vLLM's asynchronous engine, many requests in flight, weights replaced under way.

Tokens in the rollout table are the sampled tokens; text is only derived from them, never encoded again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headway.actors.chat import encode, eos_token_ids, follower
from headway.actors.generation_rows import GroupRequest, GroupSampler
from headway.actors.generation_traces import Traces, places, prepare, remove_traces
from headway.actors.samples import Sample, SampleRequest, kept_samples, kept_table
from headway.core import rollouts
from headway.core.config import Config
from headway.core.errors import (
    ConfigError,
    EngineDead,
    HandedBack,
    RolloutFailed,
    WeightUpdateFailed,
)
from headway.core.metrics import Recorder, Update
from headway.core.prompts import Prompt
from headway.core.weights import Manifest

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

    from headway.actors.generation_pressure import Pressure
    from headway.actors.generation_transport import WireEntry


class GenerationActor:
    """Serves one complete weight version at a time.

    `start` must have returned before `generate`. `update_weights` may be called while requests run: they are
    paused, keep their KV, and go on under the new version. After `hand_back` it samples nothing any more.
    """

    def __init__(self, config: Config, model_folder: str, replica: int) -> None:
        self._config = config
        self._model_folder = model_folder
        self._replica = replica
        self._recorder = Recorder()
        self._version: int | None = None
        self._updating = asyncio.Lock()
        self._serving = asyncio.Event()
        self._leaving = False
        self._traces = Traces(f"{places(config)}{replica}")
        self._shared = self._traces.weights
        self._request_numbers = count()
        self._sampling: set[str] = set()
        """Requests that the engine has."""
        self._kept: dict[int, dict[str, Sample]] = {}
        """Of groups that were handed back, by group and label."""
        self._pressure: Pressure | None = None
        self._preemptions_reported = 0

    async def start(self) -> None:
        """Starts the engine on the model folder. It serves nothing before the first `update_weights`. What a killed
        actor has left in this place of this run is removed first."""
        cores = sorted(os.sched_getaffinity(0), reverse=True)  # the learner takes the first ones
        prepare(self._traces.folder, self._config.generation.threads, self._replica, cores)
        from transformers import AutoTokenizer
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        from headway.actors import generation_transport as transport
        from headway.actors.generation_pressure import Pressure

        transport.register()
        config = self._config
        if config.generation.max_model_len is None:
            raise ConfigError("generation.max_model_len must be resolved before an engine starts")
        self._tokenizer = AutoTokenizer.from_pretrained(self._model_folder)
        self._eos_ids = eos_token_ids(Path(self._model_folder), self._tokenizer)
        on_cpu = current_platform.is_cpu()

        def pressure(*args: Any) -> Pressure:
            self._pressure = Pressure(*args)
            return self._pressure

        remove_traces(places(config))
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=self._model_folder,
                dtype=config.model.dtype,
                seed=config.run.seed,
                enforce_eager=on_cpu,
                tensor_parallel_size=(size := max(1, int(config.generation.gpus))),
                # By itself it would start its workers through Ray, in the placement group, all of which this actor has.
                distributed_executor_backend="mp" if size > 1 else None,
                max_model_len=config.generation.max_model_len,
                max_num_seqs=config.generation.max_concurrent_requests,
                # A seeded request whose prefill is split rewinds its generator, which CPU generators cannot do.
                enable_chunked_prefill=False if on_cpu else None,
                max_num_batched_tokens=max(2048, config.generation.max_model_len) if on_cpu else None,
                gpu_memory_utilization=config.generation.gpu_memory_utilization,
                kv_cache_memory_bytes=int(config.generation.kv_cache_gib * 2**30) if on_cpu else None,
                enable_prefix_caching=config.generation.prefix_caching,
                skip_tokenizer_init=True,
                # Temperature and nucleus are in the reported log-probabilities: they describe the policy that
                # sampled, not the bare model.
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,  # those that vLLM logs by itself; `Pressure` still gets its own
                weight_transfer_config=WeightTransferConfig(backend=transport.BACKEND),
                worker_extension_cls=f"{transport.__name__}.{transport.WeightReader.__name__}",
            ),
            stat_loggers=[pressure],
        )
        if manager := self._engine.logger_manager:
            # vLLM adds one that observes every token, for an endpoint that nobody reads: 6 us per token.
            manager.stat_loggers = [
                each for each in manager.stat_loggers if not isinstance(each, PrometheusStatLogger)
            ]
        self._traces.note()

    async def serve_loaded(self, version: int = 0) -> None:
        """Serves the weights that the engine read from its model folder, as `version`."""
        await self._engine.update_weight_version(str(version))
        self._version = version
        self._serving.set()

    async def update_weights(self, manifest: Manifest, *buckets: np.ndarray) -> dict[str, float]:
        """Loads one complete version and serves it. Returns seconds by stage: fetch, pause, load, total.

        Raises `WeightUpdateFailed` when bytes arrived wrong (the old version goes on serving) or the load failed
        (the engine serves nothing until a later update succeeds).
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        async with self._updating:
            try:
                return await self._update(manifest, buckets)
            except EngineDeadError as error:
                raise EngineDead("generation", self._replica) from error

    async def _update(self, manifest: Manifest, buckets: tuple[np.ndarray, ...]) -> dict[str, float]:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        started = time.monotonic()
        path = str(self._shared)
        entries = await asyncio.to_thread(_lay_out, self._shared, manifest, buckets)
        for digests in await self._engine.collective_rpc("arrived_digests", args=(path, entries)):
            _compare(digests, manifest, "arrived", expected=len(entries))
        fetched = time.monotonic()
        # New requests wait outside: one that entered now would carry the old version's prefix-cache salt.
        self._serving.clear()
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        paused = time.monotonic()
        try:
            await self._engine.start_weight_update()
            await self._engine.update_weights(
                WeightTransferUpdateRequest(
                    update_info={"path": path, "entries": entries, "adapter_scale": manifest.adapter_scale}
                )
            )
            await self._engine.finish_weight_update()
            if manifest.adapter_scale is None:
                for digests in await self._engine.collective_rpc("live_digests", args=(entries,)):
                    _compare(digests, manifest, "live", expected=1)
            else:
                await self._engine.collective_rpc(
                    "probe_adapter", args=(path, entries, manifest.adapter_scale)
                )
            await self._engine.update_weight_version(str(manifest.version))
        except WeightUpdateFailed:
            raise
        except Exception as error:  # whatever broke, the engine's weights are unknown from here on
            raise WeightUpdateFailed(
                f"engine {self._replica}, version {manifest.version}: {error}"
            ) from error
        loaded = time.monotonic()
        self._version = manifest.version
        await self._engine.resume_generation()
        self._serving.set()
        ended = time.monotonic()
        seconds = {
            "fetch": fetched - started,
            "pause": ended - fetched,
            "load": loaded - paused,
            "total": ended - started,
        }
        for stage, value in seconds.items():
            self._recorder.observe("headway_weight_sync_seconds", [value], label=stage)
        self._recorder.set("headway_engine_version", manifest.version, label=str(self._replica))
        return seconds

    async def generate(self, request: GroupRequest, kept: pa.Table | None = None) -> pa.Table:
        """Samples one group, from what is `kept` of it on where an engine handed it back (`take_back`).

        Raises `RolloutFailed` when the engine cannot, or not in `deadline_s`, which is the time that this engine may
        take; `HandedBack` when `hand_back` came before it was complete. The rows are those of `GroupSampler`; extra
        ones among them must be folded (`extra_rollouts.fold`) before the table is trained on.
        """
        started = time.time()
        tokenizer = self._tokenizer
        sampler = GroupSampler(
            request=request,
            run_seed=self._config.run.seed,
            sample=self.sample,
            encode=self._encode,
            decode=self._decode,
            follow=follower(tokenizer, chat_template=self._config.model.chat_template),
            special_tokens=tokenizer.all_special_tokens,
            kept=kept_samples(kept) if kept is not None else {},
        )
        try:
            async with self._within(request.deadline_s, f"group {request.group_id}"):
                rows = await sampler.rows()
        except HandedBack:
            self._kept[request.group_id] = sampler.kept
            raise
        timing = {"started": started, "finished": time.time(), "scored": None}
        return rollouts.build({**row, "timing": timing} for row in rows)

    async def hand_back(self) -> None:
        """Stops sampling, for good. Every `generate` that is not complete ends at once with `HandedBack`, those to
        come too; `take_back` gives what each group has. Works while an update runs or after one failed."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self._leaving = True
        self._serving.set()  # whoever waits to be served sees that it will not be
        try:
            while self._sampling:
                # Again, as one that was just being added was not found.
                await self._engine.abort(list(self._sampling))
                await asyncio.sleep(0.005)
        except EngineDeadError as error:
            raise EngineDead("generation", self._replica) from error

    async def take_back(self, group_id: int) -> pa.Table | None:
        """The samples of a group that was handed back (`KEPT_SCHEMA`), those that it came with among them; None when
        it has none. They are then forgotten here."""
        samples = self._kept.pop(group_id, None)
        return kept_table(samples) if samples else None

    async def sample(self, request: SampleRequest) -> Sample:
        """One continuation of the prefix, unfinished when `hand_back` came meanwhile. Whoever awaits it sets a deadline.

        Raises `RolloutFailed` when prefix and budget do not fit the engine or when it fails, `HandedBack` when nothing
        was sampled before `hand_back`.
        """
        limit = self._config.generation.max_model_len
        needed = len(request.prefix_ids) + request.max_new_tokens
        if limit is not None and needed > limit:
            raise RolloutFailed(
                "generation_failed",
                f"{request.name}: a prompt of {len(request.prefix_ids)} tokens and {request.max_new_tokens} new ones "
                f"do not fit generation.max_model_len={limit}; set it to at least {needed}",
            )
        if not self._leaving:
            await self._serving.wait()
        if self._leaving:
            raise HandedBack(request.name)
        output = await self._ask(request)
        ids = list(output.token_ids)
        self._recorder.inc("headway_generation_tokens_total", len(ids))
        if not ids and self._leaving:
            raise HandedBack(request.name)
        if not ids:
            raise RolloutFailed("generation_failed", f"{request.name}: the engine returned no tokens")
        # Decided here and not by the engine's word: the budget ended it, whatever it was doing.
        stopped = ids[-1] in self._eos_ids
        truncated = len(ids) >= request.max_new_tokens and not stopped
        if not stopped and not truncated and not self._leaving:
            raise RolloutFailed(
                "generation_failed", f"{request.name}: the engine gave up ({output.finish_reason})"
            )
        return Sample(
            ids=ids,
            logprobs=_sampled_logprobs(output, ids),
            version_spans=[
                {"start": span.start, "end": span.end, "version": int(span.version)}
                for span in output.weight_versions or ()
                if span.end > span.start
            ],
            finish_reason="stop" if stopped else "length" if truncated else "abort",
            truncated=truncated,
        )

    async def _ask(self, request: SampleRequest) -> CompletionOutput:
        """The engine's one output: whole, or what it had when the request was aborted."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_new_tokens,
            seed=request.seed,
            stop_token_ids=self._eos_ids,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(request.prefix_ids), "cache_salt": f"v{self._version}"}
        number = str(next(self._request_numbers))
        self._sampling.add(number)
        final = None
        try:
            async for output in self._engine.generate(prompt, params, number):  # type: ignore[arg-type]
                final = output
        finally:
            self._sampling.discard(number)
        if final is None:
            raise RolloutFailed("generation_failed", f"{request.name}: the engine returned nothing")
        return final.outputs[0]

    @asynccontextmanager
    async def _within(self, deadline_s: float, what: str) -> AsyncIterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError:
            raise RolloutFailed("straggler", f"{what} passed {deadline_s:.0f} s") from None
        except EngineDeadError as error:
            raise EngineDead("generation", self._replica) from error

    def _encode(self, prompt: Prompt) -> list[int]:
        return encode(self._tokenizer, prompt, chat_template=self._config.model.chat_template)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    async def version(self) -> int | None:
        """Version that new requests are sampled under; None before the first update."""
        return self._version

    async def report(self) -> tuple[float, int, list[Update]]:
        """Share of the KV cache in use, requests pushed out of it since the start, and metric updates since the last
        report. Answers while weights are updated, and before the engine has started."""
        usage, preemptions = 0.0, 0
        if self._pressure is not None:
            # The scheduler speaks only after a step, and there is none after the last request was aborted.
            usage = self._pressure.kv_cache_usage if self._sampling else 0.0
            preemptions = self._pressure.preemptions
        new, self._preemptions_reported = preemptions - self._preemptions_reported, preemptions
        self._recorder.set("headway_engine_kv_cache_usage_ratio", usage, label=str(self._replica))
        self._recorder.inc("headway_engine_preemptions_total", new, label=str(self._replica))
        return usage, preemptions, self._recorder.drain()

    async def ping(self) -> bool:
        """True while the engine's processes answer."""
        await self._engine.check_health()
        return True

    async def shutdown(self) -> None:
        """Ends the engine's processes and removes their files."""
        if hasattr(self, "_engine"):
            self._engine.shutdown(
                timeout=0
            )  # it would wait for its processes, and then end them all the same
            del self._engine  # its finaliser needs modules that are gone at interpreter exit
        self._traces.remove()


def _lay_out(path: Path, manifest: Manifest, buckets: tuple[np.ndarray, ...]) -> list[WireEntry]:
    """Writes the buckets end to end into the shared file; returns where each tensor lies in it."""
    sizes = tuple(len(bucket) for bucket in buckets)
    if sizes != manifest.bucket_bytes:
        raise WeightUpdateFailed(
            f"version {manifest.version}: buckets of {sizes} bytes, manifest {manifest.bucket_bytes}"
        )
    starts = np.cumsum([0, *sizes])
    if path.stat().st_size != manifest.num_bytes:
        os.truncate(path, manifest.num_bytes)
    if not manifest.num_bytes:
        raise WeightUpdateFailed(f"version {manifest.version} holds no tensors")
    shared = np.memmap(path, dtype=np.uint8, mode="r+")
    for start, bucket in zip(starts, buckets, strict=False):
        shared[start : start + len(bucket)] = bucket
    return [
        (entry.name, entry.dtype, entry.shape, int(starts[entry.bucket]) + entry.offset, entry.num_bytes)
        for entry in manifest.entries
    ]


def _compare(digests: dict[str, str], manifest: Manifest, what: str, *, expected: int) -> None:
    published = manifest.digests
    wrong = [name for name, value in digests.items() if value != published[name]]
    if wrong or len(digests) < expected:
        raise WeightUpdateFailed(
            f"version {manifest.version}: {what} digests differ for {wrong[:3]} "
            f"({len(wrong)} of {len(digests)} checked, at least {expected} expected)"
        )


def _sampled_logprobs(output: CompletionOutput, ids: list[int]) -> list[float]:
    """The sampled token's log-probability per position; NaN, never 0, where the engine gave none."""
    if output.logprobs is None or len(output.logprobs) != len(ids):
        return [float("nan")] * len(ids)
    values = []
    for token, candidates in zip(ids, output.logprobs, strict=True):
        entry = candidates.get(token) if candidates else None
        values.append(entry.logprob if entry is not None else float("nan"))
    return values
