"""CPU stand-in for SGLang's kernel package: PyPI's sglang-kernel 0.4.10 is a CUDA build (no CPU build is published).

Only what SGLang's CPU path calls for dense decoder models with the torch_native attention backend exists. Any other
name raises when it is called, never silently computes something else.
torch.ops.sgl_kernel.convert_weight_packed must stay
unregistered: SGLang takes its presence for AMX support and would then call the real kernels.
"""

import ctypes

__version__ = "0.0.0+cpu.standin"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, row_stride):
    """Write each request's new KV slots into its row of req_to_token (int32, [requests, max_context])."""
    position = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[position : position + end - start]
        position += end - start


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy KV slots src_loc to tgt_loc in every buffer; data_ptrs are byte addresses, strides bytes per slot."""
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + s * stride, stride) for s in src_loc.tolist()]
        for t, row in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(base + t * stride, row, stride)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    missing.__name__ = name
    return missing
