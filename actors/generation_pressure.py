"""How full an engine is, as its scheduler says after each step."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class Pressure(StatLoggerBase):
    """Keeps the last state of the KV cache and counts preemptions. One scheduler writes it: data parallelism is
    engines side by side here."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.kv_cache_usage = 0.0
        """Share of the blocks that running requests hold, in [0, 1], after the last step."""
        self.preemptions = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass
