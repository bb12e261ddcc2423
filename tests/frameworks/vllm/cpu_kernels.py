"""Operations of vLLM's compiled extension for CPUs, in torch: those that an engine of small models calls.

vLLM is installed without its extension, whose build needs sources from elsewhere. Its own CPU platform,
worker and attention backend run unchanged, and call these by their names in `torch.ops._C`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

LIBRARIES: list[Any] = []  # keeps what is registered
ATTENTION_OPTIONS = "float k_scale, float v_scale, str kv_cache_dtype"


def init_cpu_memory_env(node_ids: Sequence[int]) -> None:
    """Bind nothing: the memory of these models is small."""


def get_scheduler_metadata(*args: Any) -> torch.Tensor:
    """Return an empty plan: attention below divides no work."""
    return torch.empty(0)


def compute_slot_mapping_kernel_impl(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Fill the slots of the tokens: those of request i are `query_start_loc[i:i + 2]`."""
    starts = query_start_loc.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        where = positions[start:end]
        blocks = block_table[request].long()[where // block_size]
        slot_mapping[start:end] = blocks * block_size + where % block_size


def cpu_attn_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
) -> None:
    """Write keys and values [tokens, heads, size] to caches [blocks, heads, slots of a block, size]."""
    block_size = key_cache.shape[2]
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[: len(used)][used]
    value_cache[blocks, :, offsets] = value[: len(used)][used]


def cpu_attention_with_kv_cache(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int,
    block_table: torch.Tensor,
    softcap: float,
    scheduler_metadata: torch.Tensor | None,
    s_aux: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
    kv_cache_dtype: str,
) -> None:
    """Write attention of queries [tokens, heads, size] over the caches of their requests to `output`."""
    options = alibi_slopes, s_aux, dynamic_causal
    if any(each is not None for each in options) or softcap or not causal:
        raise NotImplementedError("Attention other than causal.")
    starts = query_start_loc.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        length = int(seq_lens[request])
        blocks = block_table[request, : -(-length // key_cache.shape[2])].long()
        key, value = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (key_cache, value_cache)
        )
        first = length - (end - start)  # position of the first query
        visible = torch.ones(end - start, length, dtype=torch.bool).tril(first)
        if sliding_window != -1:
            visible = visible.triu(first - sliding_window + 1)
        found = torch.nn.functional.scaled_dot_product_attention(
            query[start:end].transpose(0, 1), key, value, visible, scale=scale, enable_gqa=True
        )
        output[start:end].view(end - start, *found.shape[::2]).copy_(found.transpose(0, 1))


def silu_and_mul(out: torch.Tensor, input: torch.Tensor) -> None:
    """Write the product of silu(the first half) and the second half, of the last dimension."""
    gate, up = input.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def gelu_tanh_and_mul(out: torch.Tensor, input: torch.Tensor) -> None:
    """Write the product of gelu(the first half) and the second half, of the last dimension."""
    gate, up = input.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def gelu_new(out: torch.Tensor, input: torch.Tensor) -> None:
    """Write gelu, approximated with tanh."""
    out.copy_(torch.nn.functional.gelu(input, approximate="tanh"))


def prepack_moe_weight(weight: torch.Tensor, packed_weight: torch.Tensor, isa: str) -> None:
    """Leave the order of the weights."""
    packed_weight.copy_(weight)


def cpu_fused_moe(
    output: torch.Tensor,
    input: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_id: torch.Tensor,
    skip_weighted: bool,
    act: str,
    isa: str,
) -> None:
    """Write the sum of each token's experts, times their weights; w13 is [experts, 2 * inner, outer]."""
    if act != "silu" or skip_weighted or w13_bias is not None or w2_bias is not None:
        raise NotImplementedError("Experts other than those with silu.")
    output.zero_()
    for token, (weights, experts) in enumerate(zip(topk_weights, topk_id.tolist(), strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            gate, up = (w13[expert] @ input[token]).chunk(2)
            output[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))


SCHEMAS = {
    "init_cpu_memory_env": "(SymInt[] node_ids) -> ()",
    "get_scheduler_metadata": "(int num_req, int num_heads_q, int num_heads_kv, int head_dim,"
    " Tensor seq_lens, ScalarType dtype, Tensor query_start_loc, bool casual, int window_size, str isa_hint,"
    " bool enable_kv_split, Tensor? dynamic_causal, str kv_cache_dtype) -> Tensor",
    "compute_slot_mapping_kernel_impl": "(Tensor query_start_loc, Tensor positions, Tensor block_table,"
    " Tensor(a3!) slot_mapping, SymInt block_size) -> ()",
    "cpu_attn_reshape_and_cache": "(Tensor key, Tensor value, Tensor(a2!) key_cache, Tensor(a3!) value_cache,"
    f" Tensor slot_mapping, str isa, {ATTENTION_OPTIONS}) -> ()",
    "cpu_attention_with_kv_cache": "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a3!) output,"
    " Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes,"
    " SymInt sliding_window, Tensor block_table, float softcap, Tensor? scheduler_metadata, Tensor? s_aux,"
    f" Tensor? dynamic_causal, {ATTENTION_OPTIONS}) -> ()",
    "prepack_moe_weight": "(Tensor weight, Tensor(a1!) packed_weight, str isa) -> ()",
    "cpu_fused_moe": "(Tensor(a0!) output, Tensor input, Tensor w13, Tensor w2, Tensor? w13_bias,"
    " Tensor? w2_bias, Tensor topk_weights, Tensor topk_id, bool skip_weighted, str act, str isa) -> ()",
    **dict.fromkeys(("silu_and_mul", "gelu_tanh_and_mul", "gelu_new"), "(Tensor! out, Tensor input) -> ()"),
}


def register() -> None:
    """Define the operations in `torch.ops._C`, once."""
    if LIBRARIES:
        return
    torch.cpu._is_amx_tile_supported = lambda: False  # vLLM has other operations for it
    new_library: Any = torch.library.Library
    library = new_library("_C", "DEF")
    LIBRARIES.append(library)
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, globals()[name], "CompositeExplicitAutograd")
