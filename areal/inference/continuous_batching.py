"""transformers' continuous batching without its thread: scheduler, paged cache and step, driven by the caller.

Its manager owns a thread, samples from torch's global generator, reports log-probs after top-k and top-p, and drops
the partial tokens of a cancelled request. So the processor below it is used directly, with own sampling.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.initialization import resolve_continuous_batching_config
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from areal.inference.paged_attention import plan_attention


@dataclass(frozen=True)
class CacheSize:
    """Room for keys and values, and how much one step may hold, in tokens."""

    kv_tokens: int
    page_size: int = 32
    max_batch_tokens: int = 2048
    max_requests: int = 1024
    share_prefixes: bool = True


Sampler = Callable[[list[str], Tensor], Tensor]
"""``(request ids, logits [n, V] fp32) -> tokens [n]``."""


class ContinuousBatching:
    """Schedules requests and runs one step of all that fit. Not thread-safe.

    Args:
        model: gives the shapes of the cache; each step names the model it runs.
        sampler: called once per step for the requests whose prompt is in the cache.
    """

    def __init__(self, model: nn.Module, size: CacheSize, sampler: Sampler) -> None:
        self.finished: list[str] = []
        self._processor = _build_processor(model, size, self.finished, sampler)

    def add(self, request_id: str, input_ids: list[int], max_new_tokens: int, stop_ids: list[int]) -> None:
        self._processor.scheduler.add_waiting_request(
            RequestState(request_id, input_ids, max_new_tokens=max_new_tokens, eos_token_id=stop_ids)
        )

    def cancel(self, request_ids: list[str]) -> None:
        scheduler = self._processor.scheduler
        for request_id in request_ids:
            scheduler.set_request_cancellation(request_id)
        scheduler.clear_cancelled_requests()
        # Set when the cache overflows and cleared when a request finishes, but not when one is cancelled.
        scheduler.block_new_requests = False

    def clear(self) -> None:
        """Forget all requests and everything in the cache."""
        self._processor.reset()
        self._processor.cache.reset()

    @property
    def waiting(self) -> int:
        return len(self._processor.scheduler.waiting_requests)

    @property
    def free_fraction(self) -> float:
        return float(self._processor.cache.compute_free_capacity())

    @torch.no_grad()
    def step(self, model: nn.Module) -> list[str]:
        """Run one forward and sample; returns the requests that met a stop token or their budget.

        Raises:
            RuntimeError: nothing can be scheduled.
        """
        if not self._processor.prepare_next_batch():
            raise RuntimeError("the scheduler has requests and can run none of them")
        inputs = self._processor.inputs_and_outputs
        batch: dict[str, Any] = dict(inputs.get_model_kwargs())
        scheduled = inputs.requests_in_batch
        plan = plan_attention(
            [item.query_length for item in scheduled], [item.state.position_offset for item in scheduled]
        )
        read_index = batch["read_index"][0]
        if read_index.numel():
            # Let the cache return keys and values in the padded order of the plan.
            batch["read_index"] = [read_index[plan.keys]]
            plan = replace(plan, keys_gathered=True)
        self._processor.model_runner.compute_batch(model, batch | {"attention_plan": plan})
        self._processor.update_batch()
        finished = self.finished[:]
        self.finished.clear()
        return finished


class _Runner(ModelRunner):
    """Samples with the engine's sampler in place of torch's global generator."""

    sampler: Sampler

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        ids = [item.state.request_id for item in self.inputs_and_outputs.requests_in_batch if item.has_new_token]
        output_ids[0, : len(ids)] = self.sampler(ids, scores[0, : len(ids)])


class _Router(OutputRouter):
    """Keeps the ids of the requests that ended; the sampler already has their tokens."""

    def __init__(self, finished: list[str]) -> None:
        super().__init__()
        self._finished = finished

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        self._finished.extend(output.request_id for output in outputs)


class _SingleProcess(DistributedHelper):
    """Leaves the global generator alone: it belongs to the trainer of this process."""

    def set_tp_seed(self, seed: int | None, model_device: torch.device) -> None:
        pass


def _build_processor(
    model: nn.Module, size: CacheSize, finished: list[str], sampler: Sampler
) -> ContinuousBatchProcessor:
    distributed = _SingleProcess(device_mesh=None, cpu_group_timeout=None)
    config = resolve_continuous_batching_config(
        config=model.config,
        cb_config=ContinuousBatchingConfig(
            page_size=size.page_size,
            num_blocks=-(-size.kv_tokens // size.page_size),
            max_batch_tokens=size.max_batch_tokens,
            max_requests_per_batch=min(size.max_requests, size.max_batch_tokens),
            max_blocks_per_request=0,
            allow_block_sharing=size.share_prefixes,
            use_async_batching=False,
            use_cuda_graph=False,
        ),
        workload_hints=None,
        has_logit_processors=False,
    )
    cache = PagedAttentionCache(
        config=model.config,
        continuous_batching_config=config,
        device=model.device,
        distributed_helper=distributed,
        dtype=model.dtype,
        model_supports_logits_to_keep=True,
    )
    no_processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
    processor = ContinuousBatchProcessor(
        cache=cache,
        config=model.config,
        generation_config=GenerationConfig(do_sample=False),
        continuous_batching_config=config,
        logit_processor=no_processors,
        input_queue=queue.Queue(),
        cancel_queue=queue.Queue(),
        output_router=_Router(finished),
        background_thread_status=BackgroundThreadStatus(),
        model_device=model.device,
        model_dtype=model.dtype,
        scheduler=FIFOScheduler(
            cache=cache, safety_margin=config.safety_margin, max_requests_per_batch=config.max_requests_per_batch
        ),
        distributed_helper=distributed,
    )
    runner = _Runner(
        logit_processor=no_processors,
        cb_config=config,
        inputs_and_outputs=processor.inputs_and_outputs,
        cache=cache,
        do_sample=False,
        return_logprobs=False,
    )
    runner.sampler = sampler
    processor.model_runner = runner
    return processor
