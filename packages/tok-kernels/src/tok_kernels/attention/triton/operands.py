"""Define the operands that all attention kernels of a step share, and check them against the kernels' limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tok_kernels.attention.interface import AttentionShape
from tok_kernels.batch import LayerCache
from tok_kernels.launch_config import power_of_two

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
_CACHED = (*DTYPES, torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of the attention kernels for one layer of a step.

    q           [T, H, D]     any token and head stride
    cache       keys and values of the layer
    page_table  int32 [S, P]  page ids of every slot
    scale       factor of the scores
    window      positions that a query sees, its own included; None: all up to its own

    The kernels receive them as these arguments:
      q_token_stride, q_head_stride         strides of q in elements; its last stride is 1
      k_ptr, v_ptr                          [pages, PAGE, KV_HEADS, HEAD]
      kv_page_stride to kv_head_stride      strides of k and of v; their last stride is 1
      page_table_ptr                        int32 [S, P], whose row stride is page_table_stride
      scale                                 factor of the scores, times log2(e)
      v_scale_ptr                           float32 [KV_HEADS], or None
      k_token_scale_ptr, v_token_scale_ptr  float32 [pages, KV_HEADS, PAGE], or None
      HEAD, PADDED                          head size; the power of two to which blocks pad it
      GROUP                                 query heads per key/value head
      FP16                                  compute in float16 (`fp16`)
      WINDOW                                `window`; 0: none
    """

    q: Tensor
    cache: LayerCache
    page_table: Tensor
    scale: float
    window: int | None = None

    @property
    def kv_heads(self) -> int:
        return self.cache.k.shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.kv_heads

    @property
    def padded_head(self) -> int:
        return max(16, power_of_two(self.q.shape[2]))

    @property
    def fp16(self) -> bool:
        """Whether bfloat16 queries and float8 keys are both converted to float16 for their matmul.

        float16 holds every float8 value. A GPU converts float8 to float16 in one instruction, to bfloat16 in three.
        float16 rounds softmax weights eight times as finely as bfloat16.
        """
        return self.q.dtype == torch.bfloat16 and self.cache.k.dtype == torch.float8_e4m3fn

    def runtime(self) -> tuple[int | float | Tensor | None, ...]:
        """Return the kernels' arguments from `q_token_stride` to `v_scale_ptr`."""
        k, v = self.cache.k, self.cache.v
        return (
            *self.q.stride()[:2],
            *(k, v, self.page_table),
            *k.stride()[:3],
            self.page_table.stride(0),
            self.scale * math.log2(math.e),
            self.cache.v_scale,
        )

    def token_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the kernels' arguments `k_token_scale_ptr` and `v_token_scale_ptr`."""
        return self.cache.k_token_scale, self.cache.v_token_scale

    def static(self) -> dict[str, int]:
        """Return the kernels' compile-time arguments, which depend on the model and its cache only."""
        return {
            "PAGE": self.cache.page_size,
            "HEAD": self.q.shape[2],
            "PADDED": self.padded_head,
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "FP16": self.fp16,
            "WINDOW": self.window or 0,
        }

    def check(self) -> None:
        """Raise ValueError for operands that the kernels cannot compute."""
        heads, size = self.q.shape[1:]
        page_size, kv_heads = self.cache.k.shape[1:3]
        _require(self.q.dtype in DTYPES, "q's dtype", self.q.dtype, f"one of {DTYPES}")
        for name, cached in (("k", self.cache.k), ("v", self.cache.v)):
            _require(cached.dtype in _CACHED, f"the cache's dtype of {name}", cached.dtype, f"one of {_CACHED}")
            _require(cached.shape[3] == size, f"the cache's head size of {name}", cached.shape[3], f"q's, {size}")
            _require(
                cached.dtype != torch.float8_e4m3fn or has_fp8(cached.device),
                *(f"the cache's dtype of {name}", cached.dtype, "float8 from compute capability 8.9 on"),
            )
        strides = self.cache.k.stride()
        _require(strides[3] == 1, "the cache's last stride of k", strides[3], "1")
        _require(self.cache.v.stride() == strides, "the cache's strides of v", self.cache.v.stride(), f"k's, {strides}")
        for scale in self.token_scales():
            _require(scale is None or scale.is_contiguous(), "a per-token scale", "strided", "contiguous tensors")
        _require(page_size == power_of_two(page_size), "page_size", page_size, "a power of two")
        _require(heads % kv_heads == 0, "the number of query heads", heads, f"a multiple of {kv_heads}")
        _require(size <= MAX_HEAD_DIM, "head_dim", size, f"at most {MAX_HEAD_DIM}")
        _require(self.q.stride(2) == 1, "q's last stride", self.q.stride(2), "1")
        _require(self.scale > 0, "scale", self.scale, "positive")
        _require(self.window is None or self.window > 0, "window", self.window, "None, or integers from 1")

    def max_visible_keys(self, bound: int, queries: int = 1) -> int:
        """Return how many of at most `bound` keys a number of consecutive queries can see together."""
        return bound if self.window is None else min(bound, self.window + queries - 1)


@lru_cache
def has_fp8(device: torch.device) -> bool:
    """Return whether kernels can convert float8_e4m3fn: from compute capability 8.9 on, and when interpreted."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def unsupported_reason(shape: AttentionShape, device: torch.device) -> str | None:
    """Return why Triton's kernels cannot compute this shape here; None if they can."""
    if shape.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {shape.head_dim}; Triton's kernels allow at most {MAX_HEAD_DIM}"
    if shape.page_size & (shape.page_size - 1):
        return f"page_size is {shape.page_size}; Triton's kernels allow powers of two"
    if shape.dtype not in DTYPES:
        return f"dtype is {shape.dtype}; Triton's kernels allow {', '.join(map(str, DTYPES))}"
    if shape.cache_dtype == torch.float8_e4m3fn and not has_fp8(device):
        return f"cache_dtype is {shape.cache_dtype}; Triton's kernels allow it from compute capability 8.9 on"
    return None


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}; allowed: {allowed}")
