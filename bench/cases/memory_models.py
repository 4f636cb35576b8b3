"""Models that no test holds the closed form to: other sizes of known families, dimensions from their own cards."""

from __future__ import annotations

from tests.golden.families_attention import Blueprint, Family

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
DENSE = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
PRE_NORMS = ("attn_norm.weight", "ffn_norm.weight")


def _norms(width: int) -> Shapes:
    return (("attn_q_norm.weight", (width,)), ("attn_k_norm.weight", (width,)))


def _post_norms(e: int) -> Shapes:
    return (("post_attention_norm.weight", (e,)), ("post_ffw_norm.weight", (e,)))


def _biases(q: int, kv: int) -> Shapes:
    return (("attn_q.bias", (q,)), ("attn_k.bias", (kv,)), ("attn_v.bias", (kv,)))


def _experts(e: int, ff: int, count: int) -> Shapes:
    return (
        ("ffn_gate_inp.weight", (e, count)),
        ("ffn_gate_exps.weight", (e, ff, count)),
        ("ffn_up_exps.weight", (e, ff, count)),
        ("ffn_down_exps.weight", (ff, e, count)),
    )


BLUEPRINTS = (
    Blueprint("TinyLlama-1.1B", "llama", 22, 2048, 5632, 32, 4, 32000, context=2048),
    Blueprint(
        "Llama-3.2-3B", "llama", 28, 3072, 8192, 24, 8, 128256, tied=True, outside=(("rope_freqs.weight", (64,)),),
    ),
    Blueprint("Mistral-7B-v0.3", "llama", 32, 4096, 14336, 32, 8, 32768, context=32768),
    Blueprint("Yi-34B", "llama", 60, 7168, 20480, 56, 8, 64000, weights="q5_k"),
    Blueprint("Qwen2.5-7B", "qwen2", 28, 3584, 18944, 28, 4, 152064, with_=_biases(3584, 512)),
    Blueprint("Qwen3-8B", "qwen3", 36, 4096, 12288, 32, 8, 151936, head=128, with_=_norms(128), weights="q6_k"),
    Blueprint("Qwen3-32B", "qwen3", 64, 5120, 25600, 64, 8, 151936, head=128, with_=_norms(128)),
    Blueprint(
        "OLMo-2-13B", "olmo2", 40, 5120, 13824, 40, 40, 100352,
        context=4096, without=PRE_NORMS, with_=_norms(5120) + _post_norms(5120),
    ),
    Blueprint(
        "Gemma-3-4B", "gemma3", 34, 2560, 10240, 8, 4, 262208,
        head=256, tied=True, with_=_norms(256) + _post_norms(2560), more={"attention.sliding_window": 1024},
    ),
    Blueprint(
        "Gemma-3-27B", "gemma3", 62, 5376, 21504, 32, 16, 262208,
        head=128, tied=True, with_=_norms(128) + _post_norms(5376), more={"attention.sliding_window": 1024},
    ),
    Blueprint(
        "Gemma-2-27B", "gemma2", 46, 4608, 36864, 32, 16, 256000,
        head=128, tied=True, context=8192, with_=_post_norms(4608),
        more={"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    Blueprint(
        "Mixtral-8x22B", "llama", 56, 6144, 16384, 48, 8, 32768,
        context=65536, without=DENSE, with_=_experts(6144, 16384, 8), more={"expert_count": 8, "expert_used_count": 2},
    ),
    Blueprint(
        "Qwen3-235B-A22B", "qwen3moe", 94, 4096, 12288, 64, 4, 151936,
        head=128, without=DENSE, with_=_norms(128) + _experts(4096, 1536, 128),
        more={"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 1536},
    ),
)  # fmt: skip
FAMILIES: tuple[Family, ...] = tuple(blueprint.family() for blueprint in BLUEPRINTS)
