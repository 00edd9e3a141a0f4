"""Requests in a switch: bring the scheduler to rest, describe and pack what it runs, and run it in another seat."""

from __future__ import annotations

import pickle
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from pat.reshard.kv import Sequence
from pat.sglang.penalties import count_late_once

PROCESS_LOCAL = (
    "tokenizer",
    "time_stats",
    "session",
    "metrics_collector",
    "last_node",
    "last_host_node",
    "best_match_node",
    "lock",
    "grammar",
)
"""Attributes of SGLang's Req that mean nothing in another process, or in another seat's tree."""


def settle(scheduler) -> list[Any]:
    """Bring a scheduler to a step boundary, where no result is pending; returns the running requests, all decoding.

    A half-prefilled request goes back to the head of the queue. The scheduler can go on from here in its own layout.
    """
    if scheduler.enable_overlap and scheduler.last_batch:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.process_pending_chunked_abort()
    last, running, chunked = scheduler.last_batch, scheduler.running_batch, scheduler.chunked_req
    if chunked is not None and not chunked.finished():
        if last is not None:
            last.filter_batch(reqs_to_exclude=[chunked])
        retract(scheduler, [chunked])
        scheduler.waiting_queue.insert(0, chunked)
    scheduler.chunked_req = None
    if last is not None and last.forward_mode.is_extend() and last is not running:
        last.filter_batch()
        if running.is_empty():
            running = last
        elif not last.is_empty():
            running.merge_batch(last)
    running.filter_batch()
    running.batch_is_full = False
    if scheduler.enable_overlap:
        count_late_once(running)
    scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug = running, None, None
    return list(running.reqs)


def retract(scheduler, requests: list[Any]) -> None:
    """Free the KV cache of requests of this scheduler: they are to be prefilled again."""
    from sglang.srt.managers.schedule_batch import retract_all

    retract_all(
        reqs=requests,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
        offload_kv=False,
    )


def check_portable(scheduler, requests: list[Any]) -> None:
    """ValueError names the first request that cannot leave its process."""
    if scheduler.grammar_manager.has_waiting_grammars() or any(r.grammar is not None for r in requests):
        raise ValueError("a request constrained by a grammar is in flight")
    for request in requests:
        if request.session is not None or request.session_id is not None:
            raise ValueError(f"request {request.rid} belongs to a session")
        if request.lora_id is not None:
            raise ValueError(f"request {request.rid} uses a LoRA adapter")
        if request.multimodal_inputs is not None:
            raise ValueError(f"request {request.rid} has multimodal inputs")


@dataclass(frozen=True, slots=True)
class Described:
    """The requests of one replica: ``running`` with their KV as sequences, then ``waiting``; by request id.

    ``digest`` is equal on all ranks of the replica while they agree.
    """

    running: tuple[str, ...]
    sequences: tuple[Sequence, ...]
    waiting: tuple[str, ...]
    digest: int


def describe(scheduler, running: list[Any], waiting: list[Any], replica: int) -> Described:
    """Describe what one replica has. Sequences with the same first slots share them (``base``, within the list)."""
    rows = scheduler.req_to_token_pool.req_to_token
    first_of: dict[int, int] = {}
    sequences = []
    for i, request in enumerate(running):
        tokens = request.kv.kv_committed_len
        row = rows[request.kv.req_pool_idx, :tokens]
        base = first_of.setdefault(int(row[0]), i)
        shared = 0
        if base != i:
            common = min(tokens, sequences[base].tokens)
            other = rows[running[base].kv.req_pool_idx, :common]
            same = (row[:common] == other).to(torch.int32)
            shared = int(same.cumprod(0).sum()) // scheduler.page_size * scheduler.page_size
        sequences.append(Sequence(replica, tokens, base if shared else None, shared))
    state = [(r.rid, r.kv.kv_committed_len, len(r.output_ids), tuple(r.output_ids[-4:])) for r in running]
    digest = zlib.crc32(repr((state, [r.rid for r in waiting])).encode())
    rids = tuple(r.rid for r in running), tuple(r.rid for r in waiting)
    return Described(rids[0], tuple(sequences), rids[1], digest)


def pack(requests: list[Any]) -> bytes:
    """Requests as bytes for another process."""
    return pickle.dumps([{k: v for k, v in r.__dict__.items() if k not in PROCESS_LOCAL} for r in requests], protocol=5)


def unpack(attributes: dict[str, Any], scheduler) -> Any:
    """A request that another process has packed, as one of this scheduler."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    request = Req.__new__(Req)
    request.__dict__.update(attributes)
    request.__dict__.update(dict.fromkeys(PROCESS_LOCAL))
    request.tokenizer = scheduler.tokenizer
    request.time_stats = SchedulerReqTimeStats()
    request.time_stats.set_metrics_collector(None)
    request.time_stats.set_scheduler_recv_time()
    return request


def enqueue(scheduler, request) -> None:
    """Queue a request whose KV cache, if it had any, is gone with its old seat."""
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    if request.kv.holds_kv:
        request.kv = ReqKvInfo()
        request.reset_for_retract()
    scheduler._add_request_to_queue(request)


def resume(
    scheduler, requests: list[Any], lengths: list[int], slots: list[torch.Tensor], bases: list[int | None]
) -> None:
    """Make requests whose KV cache lies in ``slots`` (whole pages, one tensor a request) the running batch.

    ``bases``: position of the request whose first slots this one shares, or None; a base comes before its sharers,
    whose ``slots`` hold only what they do not share. The next step is one more decode.
    """
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    pool = scheduler.req_to_token_pool
    for request, tokens, own, base in zip(requests, lengths, slots, bases, strict=True):
        request.kv = ReqKvInfo(kv_committed_len=tokens, kv_allocated_len=tokens)
        (request.kv.req_pool_idx,) = pool.alloc_rows(1)
        request.lock = request.last_node = None
        request.prefix_len = 0
        start = tokens - own.numel()
        if start:
            # read the row of the base now: the tree may have put other slots there, of an equal prompt
            pool.write(
                (request.kv.req_pool_idx, slice(0, start)),
                pool.req_to_token[requests[base].kv.req_pool_idx, :start].clone(),
            )
            request.kv.cache_protected_len = start
        pool.write((request.kv.req_pool_idx, slice(start, tokens)), own.to(torch.int32))
        request.refresh_fill_ids()
        scheduler.tree_cache.checkpoint(request, up_to=tokens)
    if requests:
        scheduler.running_batch = decode_batch(scheduler, requests, lengths)
        if scheduler.enable_overlap:
            count_late_once(scheduler.running_batch)


def decode_batch(scheduler, requests: list[Any], lengths: list[int]) -> Any:
    """A ScheduleBatch of requests that have all been prefilled, as SGLang leaves one after a decode step."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    batch = ScheduleBatch.init_new(
        requests,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.forward_mode = ForwardMode.DECODE
    batch.req_pool_indices_cpu = torch.tensor([r.kv.req_pool_idx for r in requests], dtype=torch.int64)
    batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    batch.req_pool_indices = batch.req_pool_indices_cpu.to(batch.device)
    batch.seq_lens = batch.seq_lens_cpu.to(batch.device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.multimodal_inputs = [None] * len(requests)
    if batch.return_logprob:
        batch.top_logprobs_nums = [r.logprob.top_logprobs_num for r in requests]
        batch.token_ids_logprobs = [r.logprob.token_ids_logprob for r in requests]
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, scheduler.model_config.vocab_size)
    # the last token of each has no KV yet: the next step reads it, and the length, from the relay by row
    last = torch.tensor([r.output_ids[-1] for r in requests], dtype=torch.int64, device=batch.device)
    scheduler.future_map.output_tokens_buf[batch.req_pool_indices] = last
    if scheduler.enable_overlap:
        scheduler.future_map.new_seq_lens_buf[batch.req_pool_indices] = batch.seq_lens
    return batch


def clear(scheduler) -> None:
    """Empty a seat that nothing runs in: queues, tree and pools. The KV memory itself is not touched."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    scheduler.waiting_queue.clear()
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    scheduler.last_batch = scheduler.chunked_req = scheduler.cur_batch_for_debug = None
    scheduler._pending_chunked_abort_req = None
    scheduler.result_queue.clear()
    scheduler.tree_cache.reset()
    scheduler.req_to_token_pool.clear()
    scheduler.token_to_kv_pool_allocator.clear()
    scheduler.metrics_reporter.reset_metrics()
