"""Families that keep something unusual for their sequences, at their real dimensions: weights as holes.

Compressed rows, windows, shared caches, recurrent states and mixtures of them; beside these, encoders that keep
nothing. Keys and tensors are those that llama.cpp's converters write for the models named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.golden.header_file import Scalar, Tensor, write_header

Value = Scalar | Sequence[Scalar]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """One model file. `tensors` are complete; `keys` lack nothing but the tokenizer."""

    name: str
    keys: dict[str, Value]
    tensors: tuple[Tensor, ...]

    def write(self, folder: Path) -> Path:
        """The header-only file, in this folder."""
        return write_header(folder / f"{self.name}.gguf", self.keys, self.tensors)


class Draft:
    """A family being drawn: its keys without the architecture's prefix, and its tensors one after the other."""

    def __init__(
        self, architecture: str, layers: int, embedding: int, vocabulary: int, *, head: bool = True, **keys: Value
    ) -> None:
        self.architecture = architecture
        self.keys: dict[str, Value] = {
            "block_count": layers,
            "embedding_length": embedding,
            "vocab_size": vocabulary,
            "context_length": 131072,
            "attention.layer_norm_rms_epsilon": 1e-5,
            **{name.replace("__", "."): value for name, value in keys.items()},
        }
        self.tensors: list[Tensor] = []
        self.add("token_embd.weight", embedding, vocabulary)
        self.add("output_norm.weight", embedding)
        if head:
            self.add("output.weight", embedding, vocabulary)

    def add(self, name: str, *shape: int) -> None:
        """One tensor, of a number type that suits its rows."""
        self.tensors.append((name, shape, _number_type(name, shape)))

    def layer(self, at: int, *parts: Shapes) -> None:
        """The tensors of one layer."""
        for part in parts:
            for name, shape in part.items():
                self.add(f"blk.{at}.{name}", *shape)

    def family(self, name: str) -> Family:
        """The family, complete."""
        keys: dict[str, Value] = {"general.architecture": self.architecture, "general.name": name}
        keys |= {f"{self.architecture}.{key}": value for key, value in self.keys.items()}
        return Family(name, keys, tuple(self.tensors))


_ALWAYS_F32 = ("ffn_gate_inp.", "ssm_a", "ssm_d", "ssm_conv1d", "time_mix_lerp", "time_mix_first", "shortconv.conv.")


def _number_type(name: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 1 or any(word in name for word in _ALWAYS_F32):
        return "f32"
    if shape[0] % 256 == 0:
        return "q4_k"
    return "q8_0" if shape[0] % 32 == 0 else "f16"


def _per_layer(layers: int, value: int, at: Iterable[int], otherwise: int = 0) -> list[int]:
    """An array with `value` at the layers named."""
    chosen = set(at)
    return [value if layer in chosen else otherwise for layer in range(layers)]


def gated(e: int, ff: int) -> Shapes:
    """A gated feed-forward part, with its norm."""
    return {"ffn_norm.weight": (e,), "ffn_gate.weight": (e, ff), "ffn_up.weight": (e, ff), "ffn_down.weight": (ff, e)}


def attention(e: int, q: int, k: int, v: int | None = None) -> Shapes:
    """Ordinary attention of these widths, with its norm."""
    return {
        "attn_norm.weight": (e,),
        "attn_q.weight": (e, q),
        "attn_k.weight": (e, k),
        "attn_v.weight": (e, k if v is None else v),
        "attn_output.weight": (q, e),
    }


def _norms(head: int) -> Shapes:
    return {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}


def _post_norms(e: int) -> Shapes:
    return {"post_attention_norm.weight": (e,), "post_ffw_norm.weight": (e,)}


def _experts(e: int, ff: int, count: int, shared: int = 0, *, norm: bool = True, gate: bool = True) -> Shapes:
    found: Shapes = {"ffn_norm.weight": (e,)} if norm else {}
    found |= {"ffn_gate_inp.weight": (e, count), "ffn_up_exps.weight": (e, ff, count)}
    found |= {"ffn_down_exps.weight": (ff, e, count)}
    if gate:
        found |= {"ffn_gate_exps.weight": (e, ff, count)}
    if shared:
        found |= {"ffn_up_shexp.weight": (e, shared), "ffn_down_shexp.weight": (shared, e)}
        if gate:
            found |= {"ffn_gate_shexp.weight": (e, shared)}
    return found


def _next_token(e: int) -> Shapes:
    return {"nextn.eh_proj.weight": (2 * e, e), "nextn.enorm.weight": (e,), "nextn.hnorm.weight": (e,)}


def _mamba2(e: int, *, inner: int, state: int, groups: int, heads: int, norm: bool = True) -> Shapes:
    conv = inner + 2 * groups * state
    found: Shapes = {
        "ssm_in.weight": (e, inner + conv + heads),
        "ssm_conv1d.weight": (4, conv),
        "ssm_conv1d.bias": (conv,),
        "ssm_dt.bias": (heads,),
        "ssm_a": (1, heads),
        "ssm_d": (1, heads),
        "ssm_out.weight": (inner, e),
    }
    return found | ({"ssm_norm.weight": (inner // groups, groups)} if norm else {})


def _mamba(e: int, *, inner: int, state: int, rank: int) -> Shapes:
    return {
        "ssm_in.weight": (e, 2 * inner),
        "ssm_conv1d.weight": (4, inner),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (inner, rank + 2 * state),
        "ssm_dt.weight": (rank, inner),
        "ssm_dt.bias": (inner,),
        "ssm_a": (state, inner),
        "ssm_d": (inner,),
        "ssm_out.weight": (inner, e),
    }


# ------------------------------------------------------------ compressed attention


@dataclass(frozen=True, slots=True)
class Latent:
    """Widths of DeepSeek's attention: compressed rows, and heads of two parts."""

    heads: int
    row: int = 512
    turned: int = 64  # the part of a head that rotary positions turn
    straight: int = 128
    value: int = 128
    query_row: int = 0

    def keys(self, *, compressed: bool) -> dict[str, Value]:
        whole = self.turned + self.straight
        found: dict[str, Value] = {
            "attention.head_count": self.heads,
            "attention.kv_lora_rank": self.row,
            "rope.dimension_count": self.turned,
        }
        if self.query_row:
            found["attention.q_lora_rank"] = self.query_row
        if not compressed:
            widths = {"head_count_kv": self.heads, "key_length": whole, "value_length": self.value}
            return found | {f"attention.{name}": width for name, width in widths.items()}
        widths = {"head_count_kv": 1, "key_length": self.row + self.turned, "value_length": self.row}
        widths |= {"key_length_mla": whole, "value_length_mla": self.value}
        return found | {f"attention.{name}": width for name, width in widths.items()}

    def layer(self, e: int, *, compressed: bool) -> Shapes:
        whole = self.turned + self.straight
        found: Shapes = {
            "attn_norm.weight": (e,),
            "attn_kv_a_norm.weight": (self.row,),
            "attn_kv_a_mqa.weight": (e, self.row + self.turned),
            "attn_output.weight": (self.heads * self.value, e),
        }
        if self.query_row:
            found |= {"attn_q_a_norm.weight": (self.query_row,), "attn_q_a.weight": (e, self.query_row)}
            found |= {"attn_q_b.weight": (self.query_row, self.heads * whole)}
        else:
            found |= {"attn_q.weight": (e, self.heads * whole)}
        if compressed:
            found |= {"attn_k_b.weight": (self.straight, self.row, self.heads)}
            return found | {"attn_v_b.weight": (self.row, self.value, self.heads)}
        return found | {"attn_kv_b.weight": (self.row, self.heads * (self.straight + self.value))}


def _deepseek_v2_lite(*, compressed: bool) -> Family:
    e, latent = 2048, Latent(16)
    draft = Draft("deepseek2", 27, e, 102400, feed_forward_length=10944, leading_dense_block_count=1)
    draft.keys |= {"expert_count": 64, "expert_used_count": 6, "expert_feed_forward_length": 1408}
    draft.keys |= {"expert_shared_count": 2, **latent.keys(compressed=compressed)}
    for at in range(27):
        feed = _experts(e, 1408, 64, 2816) if at else gated(e, 10944)
        draft.layer(at, latent.layer(e, compressed=compressed), feed)
    return draft.family("DeepSeek-V2-Lite" + ("" if compressed else "-old"))


_INDEXER: Callable[[int, int], Shapes] = lambda e, query_row: {  # noqa: E731
    "indexer.k_norm.weight": (128,),
    "indexer.k_norm.bias": (128,),
    "indexer.proj.weight": (e, 64),
    "indexer.attn_k.weight": (e, 128),
    "indexer.attn_q_b.weight": (query_row, 64 * 128),
}


def _deepseek_v3(name: str, *, indexer: bool = False) -> Family:
    """61 layers and 671 billion weights; V3.2 adds an indexer."""
    e, latent = 7168, Latent(128, query_row=1536)
    architecture = "deepseek32" if indexer else "deepseek2"
    draft = Draft(architecture, 61, e, 129280, feed_forward_length=18432, leading_dense_block_count=3)
    draft.keys |= {"expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": 2048}
    draft.keys |= {"expert_shared_count": 1, "expert_group_count": 8, "expert_group_used_count": 4}
    draft.keys |= {"expert_gating_func": 2, "expert_weights_norm": True, **latent.keys(compressed=True)}
    if indexer:
        draft.keys |= {"attention.indexer.head_count": 64, "attention.indexer.key_length": 128}
        draft.keys |= {"attention.indexer.top_k": 2048}
    for at in range(61):
        feed = _experts(e, 2048, 256, 2048) | {"exp_probs_b.bias": (256,)} if at >= 3 else gated(e, 18432)
        extra = _INDEXER(e, 1536) if indexer else {}
        draft.layer(at, latent.layer(e, compressed=True), feed, extra)
    return draft.family(name)


def _glm_dsa() -> Family:
    """GLM-5.2: an indexer in every fourth layer, which the three after it share; the last layer predicts ahead."""
    e, layers, latent = 6144, 78, Latent(64, straight=192, value=256, query_row=2048)
    full = [at < 2 or at % 4 == 2 for at in range(layers)]
    draft = Draft("glm-dsa", layers + 1, e, 154880, feed_forward_length=12288, leading_dense_block_count=3)
    draft.keys |= {"context_length": 1048576, "nextn_predict_layers": 1, **latent.keys(compressed=True)}
    draft.keys |= {"expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": 2048}
    draft.keys |= {"expert_shared_count": 1, "attention.indexer.head_count": 64, "attention.indexer.key_length": 128}
    draft.keys |= {"attention.indexer.top_k": 2048, "attention.indexer.types": full}
    for at in range(layers + 1):
        feed = _experts(e, 2048, 256, 2048) | {"exp_probs_b.bias": (256,)} if at >= 3 else gated(e, 12288)
        extra = _INDEXER(e, 2048) if at >= layers or full[at] else {}
        draft.layer(at, latent.layer(e, compressed=True), feed, extra, _next_token(e) if at >= layers else {})
    return draft.family("GLM-5.2")


def _glm_47_flash() -> Family:
    e, latent = 2048, Latent(20, straight=192, value=256, query_row=768)
    draft = Draft("deepseek2", 48, e, 154880, feed_forward_length=10240, leading_dense_block_count=1)
    draft.keys |= {"expert_count": 64, "expert_used_count": 4, "expert_feed_forward_length": 1536}
    draft.keys |= {"expert_shared_count": 1, "nextn_predict_layers": 1, **latent.keys(compressed=True)}
    for at in range(48):
        feed = _experts(e, 1536, 64, 1536) | {"exp_probs_b.bias": (64,)} if at else gated(e, 10240)
        draft.layer(at, latent.layer(e, compressed=True), feed, _next_token(e) if at == 47 else {})
    return draft.family("GLM-4.7-Flash")


def _kimi_linear() -> Family:
    """Kimi-Linear-48B: three layers of delta attention for each of compressed attention."""
    e, latent, full = 2304, Latent(32), {3, 7, 11, 15, 19, 23, 26}
    keys = latent.keys(compressed=True) | {"attention.head_count_kv": _per_layer(27, 1, full)}
    draft = Draft("kimi-linear", 27, e, 163840, feed_forward_length=9216, leading_dense_block_count=1)
    draft.keys |= keys | {"ssm.conv_kernel": 4, "kda.head_dim": 128, "expert_gating_func": 2}
    draft.keys |= {"expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": 1024}
    draft.keys |= {"expert_shared_count": 1}
    inner = 32 * 128
    delta: Shapes = attention(e, inner, inner) | {
        **{f"ssm_conv1d_{name}.weight": (4, 1, inner) for name in "qkv"},
        "ssm_f_a.weight": (e, 128),
        "ssm_f_b.weight": (128, inner),
        "ssm_beta.weight": (e, 32),
        "ssm_a": (1, 32),
        "ssm_dt.bias": (inner,),
        "ssm_g_a.weight": (e, 128),
        "ssm_g_b.weight": (128, inner),
        "ssm_norm.weight": (128,),
    }
    for at in range(27):
        feed = _experts(e, 1024, 256, 1024) | {"exp_probs_b.bias": (256,)} if at else gated(e, 9216)
        draft.layer(at, latent.layer(e, compressed=True) if at in full else delta, feed)
    return draft.family("Kimi-Linear-48B")


# --------------------------------------------------------- windows and shared caches


def _gemma_3n() -> Family:
    """Gemma-3n-E4B: 35 layers, of which the first 20 have a cache; every fifth sees everything."""
    e, ff, head, small = 2048, 16384, 256, 256
    draft = Draft("gemma3n", 35, e, 262400, head=False, feed_forward_length=[ff] * 35)
    draft.keys |= {"attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": head}
    draft.keys |= {"attention.value_length": head, "attention.sliding_window": 512}
    draft.keys |= {"attention.sliding_window_pattern": [at % 5 < 4 for at in range(35)]}
    draft.keys |= {"attention.shared_kv_layers": 15.0, "embedding_length_per_layer_input": small}
    draft.add("altup_proj.weight", e, e, 3)
    draft.add("altup_unembd_proj.weight", e, e, 3)
    draft.add("per_layer_token_embd.weight", small * 35, 262400)
    draft.add("per_layer_model_proj.weight", e, small * 35)
    draft.add("per_layer_proj_norm.weight", small)
    wound: Shapes = {
        "inp_gate.weight": (e, small),
        "proj.weight": (small, e),
        "post_norm.weight": (e,),
        "altup_correct_coef.weight": (4, 4),
        "altup_correct_scale.weight": (e,),
        "altup_predict_coef.weight": (4, 16),
        "altup_router.weight": (e, 4),
        "altup_router_norm.weight": (e,),
        "laurel_l.weight": (e, 64),
        "laurel_r.weight": (64, e),
        "laurel_post_norm.weight": (e,),
    }
    for at in range(35):
        draft.layer(at, attention(e, 8 * head, 2 * head), _norms(head), _post_norms(e), gated(e, ff), wound)
    return draft.family("Gemma-3n-E4B")


def _gemma_4(name: str, *, layers: int, e: int, ff: int, heads: int, shared: int, small: int) -> Family:
    """Heads of 512 where everything is seen (every sixth layer), of 256 in a window; the last layers share caches."""
    slides = [at % 6 < 5 for at in range(layers)]
    kv_heads = [2 if small else (16 if slide else 4) for slide in slides]
    draft = Draft("gemma4", layers, e, 262144, head=False, feed_forward_length=ff)
    draft.keys |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads}
    draft.keys |= {"attention.key_length": 512, "attention.value_length": 512, "attention.key_length_swa": 256}
    draft.keys |= {"attention.value_length_swa": 256, "attention.sliding_window": 1024 if not small else 512}
    draft.keys |= {"attention.sliding_window_pattern": slides, "attention.shared_kv_layers": shared}
    draft.keys |= {"embedding_length_per_layer_input": small, "rope.dimension_count": 512}
    draft.keys |= {"rope.dimension_count_swa": 256}
    draft.add("rope_freqs.weight", 256)
    if small:
        draft.add("per_layer_token_embd.weight", small * layers, 262144)
        draft.add("per_layer_model_proj.weight", e, small * layers)
        draft.add("per_layer_proj_norm.weight", small)
    for at in range(layers):
        head = 256 if slides[at] else 512
        parts = [attention(e, heads * head, kv_heads[at] * head), _norms(head), _post_norms(e), gated(e, ff)]
        if small:
            parts.append({"inp_gate.weight": (e, small), "proj.weight": (small, e), "post_norm.weight": (e,)})
        draft.layer(at, *parts)
    return draft.family(name)


def _gpt_oss() -> Family:
    """gpt-oss-20b: every second layer sees a window of 128."""
    e, q, kv = 2880, 4096, 512
    draft = Draft("gpt-oss", 24, e, 201088, feed_forward_length=2880, expert_count=32, expert_used_count=4)
    draft.keys |= {"expert_feed_forward_length": 2880, "attention.head_count": 64, "attention.head_count_kv": 8}
    draft.keys |= {"attention.key_length": 64, "attention.value_length": 64, "attention.sliding_window": 128}
    bias: Shapes = {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,), "attn_output.bias": (e,)}
    bias |= {"attn_sinks.weight": (64,), "ffn_gate_inp.bias": (32,), "ffn_gate_exps.bias": (2880, 32)}
    bias |= {"ffn_up_exps.bias": (2880, 32), "ffn_down_exps.bias": (e, 32), "post_attention_norm.weight": (e,)}
    for at in range(24):
        draft.layer(at, attention(e, q, kv), _experts(e, 2880, 32, norm=False), bias)
    draft.tensors = [(name, shape, "f32" if name.endswith("bias") else kind) for name, shape, kind in draft.tensors]
    return draft.family("gpt-oss-20b")


def _llama_4() -> Family:
    """Llama-4-Scout: three layers in chunks of 8192, the fourth sees everything."""
    e, q, kv = 5120, 5120, 1024
    draft = Draft("llama4", 48, e, 202048, feed_forward_length=16384, expert_count=16, expert_used_count=1)
    draft.keys |= {"expert_feed_forward_length": 8192, "interleave_moe_layer_step": 1}
    draft.keys |= {"attention.head_count": 40, "attention.head_count_kv": 8, "rope.dimension_count": 128}
    for at in range(48):
        draft.layer(at, attention(e, q, kv), _experts(e, 8192, 16, 8192))
    return draft.family("Llama-4-Scout")


def _phi_3() -> Family:
    """Phi-3-mini states a window that the engine does not use."""
    e = 3072
    draft = Draft("phi3", 32, e, 32064, feed_forward_length=8192, attention__sliding_window=2047)
    draft.keys |= {"attention.head_count": 32, "attention.head_count_kv": 32, "rope.dimension_count": 96}
    for at in range(32):
        draft.layer(at, {"attn_norm.weight": (e,), "attn_qkv.weight": (e, 3 * e), "attn_output.weight": (e, e)})
        draft.layer(at, {"ffn_norm.weight": (e,), "ffn_up.weight": (e, 16384), "ffn_down.weight": (8192, e)})
    return draft.family("Phi-3-mini")


def _exaone_4() -> Family:
    """EXAONE-4.0-32B: three layers of four see 4096 tokens, and the file says neither of it."""
    e, ff, head = 5120, 27392, 128
    draft = Draft("exaone4", 64, e, 102400, feed_forward_length=ff, attention__head_count=40)
    draft.keys |= {"attention.head_count_kv": 8, "attention.key_length": head, "attention.value_length": head}
    for at in range(64):
        own = {name: shape for name, shape in attention(e, 40 * head, 8 * head).items() if name != "attn_norm.weight"}
        feed = {name: shape for name, shape in gated(e, ff).items() if name != "ffn_norm.weight"}
        draft.layer(at, own, _norms(head), _post_norms(e), feed)
    return draft.family("EXAONE-4.0-32B")


def _small_thinker() -> Family:
    """SmallThinker-21B: the first layer of four sees everything, the others 4096 tokens, whatever the file states."""
    e, head = 2560, 128
    draft = Draft("smallthinker", 52, e, 151936, feed_forward_length=768, expert_count=64, expert_used_count=6)
    draft.keys |= {"expert_feed_forward_length": 768, "expert_gating_func": 2, "attention.sliding_window": 8192}
    draft.keys |= {"attention.head_count": 28, "attention.head_count_kv": 4, "attention.key_length": head}
    draft.keys |= {"attention.value_length": head}
    for at in range(52):
        draft.layer(at, attention(e, 28 * head, 4 * head), _experts(e, 768, 64))
    return draft.family("SmallThinker-21B")


def _mimo_2() -> Family:
    """MiMo-V2-Flash: keys wider than values, more heads in a window, and layers that predict ahead."""
    e, layers, ahead = 4096, 48, 3
    slides = [0 < at < layers - 1 and at % 6 != 5 for at in range(layers)] + [True] * ahead
    kv_heads = [8 if slide else 4 for slide in slides]
    draft = Draft("mimo2", layers + ahead, e, 152576, feed_forward_length=16384, nextn_predict_layers=ahead)
    draft.keys |= {"expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": 2048}
    draft.keys |= {"attention.head_count": 64, "attention.head_count_kv": kv_heads, "rope.dimension_count": 64}
    draft.keys |= {"attention.key_length": 192, "attention.value_length": 128, "attention.sliding_window": 128}
    draft.keys |= {"attention.sliding_window_pattern": slides}
    for at in range(layers + ahead):
        own = attention(e, 64 * 192, kv_heads[at] * 192, kv_heads[at] * 128) | {"attn_output.weight": (64 * 128, e)}
        own |= {"attn_sinks.weight": (64,)} if slides[at] else {}
        feed = _experts(e, 2048, 256) | {"exp_probs_b.bias": (256,)} if 0 < at < layers else gated(e, 16384)
        draft.layer(at, own, feed, _next_token(e) if at >= layers else {})
    return draft.family("MiMo-V2-Flash")


# ---------------------------------------------------------------- recurrent states


def _mamba_130m() -> Family:
    e = 768
    draft = Draft("mamba", 24, e, 50280, head=False, feed_forward_length=0, attention__head_count=0)
    draft.keys |= {"ssm.conv_kernel": 4, "ssm.inner_size": 1536, "ssm.state_size": 16, "ssm.time_step_rank": 48}
    for at in range(24):
        draft.layer(at, {"attn_norm.weight": (e,)}, _mamba(e, inner=1536, state=16, rank=48))
    return draft.family("Mamba-130M")


def _mamba2_370m() -> Family:
    e = 1024
    draft = Draft("mamba2", 48, e, 50280, head=False, feed_forward_length=0, attention__head_count=0)
    draft.keys |= {"ssm.conv_kernel": 4, "ssm.inner_size": 2048, "ssm.state_size": 128, "ssm.time_step_rank": 32}
    draft.keys |= {"ssm.group_count": 1}
    for at in range(48):
        draft.layer(at, {"attn_norm.weight": (e,)}, _mamba2(e, inner=2048, state=128, groups=1, heads=32))
    return draft.family("Mamba-2-370M")


def _rwkv_6() -> Family:
    """RWKV-6 1.6B."""
    e, ff = 2048, 7168
    draft = Draft("rwkv6", 24, e, 65536, feed_forward_length=ff, attention__head_count=0, wkv__head_size=64)
    draft.keys |= {"time_mix_extra_dim": 32, "time_decay_extra_dim": 64, "rescale_every_n_layers": 6}
    draft.keys |= {"attention.layer_norm_epsilon": 1e-5}
    for name in ("token_embd_norm.weight", "token_embd_norm.bias", "output_norm.bias"):
        draft.add(name, e)
    mix: Shapes = {
        **{f"attn_norm{n}.{part}": (e,) for n in ("", "_2") for part in ("weight", "bias")},
        "time_mix_w1.weight": (e, 160),
        "time_mix_w2.weight": (32, e, 5),
        "time_mix_lerp_x.weight": (e, 1, 1),
        "time_mix_lerp_fused.weight": (e, 1, 1, 5),
        "time_mix_first.weight": (64, e // 64),
        "time_mix_decay.weight": (e,),
        "time_mix_decay_w1.weight": (e, 64),
        "time_mix_decay_w2.weight": (64, e),
        **{f"time_mix_{name}.weight": (e, e) for name in ("key", "value", "receptance", "gate", "output")},
        "time_mix_ln.weight": (e,),
        "time_mix_ln.bias": (e,),
        "channel_mix_lerp_k.weight": (e, 1, 1),
        "channel_mix_lerp_r.weight": (e, 1, 1),
        "channel_mix_key.weight": (e, ff),
        "channel_mix_value.weight": (ff, e),
        "channel_mix_receptance.weight": (e, e),
    }
    for at in range(24):
        draft.layer(at, mix)
    return draft.family("RWKV-6-1.6B")


def _arwkv_7() -> Family:
    """ARWKV-7 1.5B: RWKV layers in place of Qwen's attention; it shifts one token, not two."""
    e, ff = 1536, 8960
    draft = Draft("arwkv7", 28, e, 151936, feed_forward_length=ff, attention__head_count=0, wkv__head_size=64)
    draft.keys |= {"attention.decay_lora_rank": 96, "attention.iclr_lora_rank": 96, "token_shift_count": 1}
    draft.keys |= {"attention.value_residual_mix_lora_rank": 64, "attention.gate_lora_rank": 128}
    for at in range(28):
        ranks = {"w": 96, "a": 96, "v": 64 if at else 96, "g": 128}
        mix: Shapes = {
            "attn_norm.weight": (e,),
            **{f"time_mix_{name}0.weight": (e,) for name in "wav"},
            **{f"time_mix_{name}1.weight": (e, rank) for name, rank in ranks.items()},
            **{f"time_mix_{name}2.weight": (rank, e) for name, rank in ranks.items()},
            "time_mix_lerp_fused.weight": (e, 1, 1, 6),
            **{f"time_mix_{name}.weight": (e,) for name in ("k_k", "k_a", "r_k")},
            **{f"time_mix_{name}.weight": (e, e) for name in ("key", "value", "receptance", "output")},
        }
        draft.layer(at, mix, gated(e, ff))
    return draft.family("ARWKV-7-1.5B")


# ------------------------------------------------------------------------ mixtures


def _qwen3_next() -> Family:
    """Qwen3-Next-80B: every fourth layer attends, the others are gated delta nets."""
    e, head, experts = 2048, 256, 512
    draft = Draft("qwen3next", 48, e, 151936, feed_forward_length=5120, expert_count=experts)
    draft.keys |= {"expert_used_count": 10, "expert_feed_forward_length": 512}
    draft.keys |= {"expert_shared_feed_forward_length": 512, "full_attention_interval": 4}
    draft.keys |= {"attention.head_count": 16, "attention.head_count_kv": 2, "attention.key_length": head}
    draft.keys |= {"attention.value_length": head, "rope.dimension_count": 64, "ssm.conv_kernel": 4}
    draft.keys |= {"ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32}
    delta: Shapes = {
        "attn_norm.weight": (e,),
        "attn_qkv.weight": (e, 8192),
        "attn_gate.weight": (e, 4096),
        "ssm_conv1d.weight": (4, 8192),
        "ssm_dt.bias": (32,),
        "ssm_a": (32,),
        "ssm_ba.weight": (e, 64),
        "ssm_norm.weight": (128,),
        "ssm_out.weight": (4096, e),
    }
    full = attention(e, 4096, 512) | {"attn_q.weight": (e, 8192)} | _norms(head)
    feed = _experts(e, 512, experts, 512, norm=False)
    feed |= {"ffn_gate_inp_shexp.weight": (e,), "post_attention_norm.weight": (e,)}
    for at in range(48):
        draft.layer(at, full if at % 4 == 3 else delta, feed)
    return draft.family("Qwen3-Next-80B")


def _qwen_35() -> Family:
    """Qwen3.5-9B: like Qwen3-Next without experts; the layers are flagged one by one."""
    e, ff, layers, ahead, head = 4096, 12288, 32, 1, 256
    draft = Draft("qwen35", layers + ahead, e, 248320, feed_forward_length=ff, nextn_predict_layers=ahead)
    flags = [at < layers and at % 4 != 3 for at in range(layers + ahead)]
    draft.keys |= {"attention.head_count": 16, "attention.head_count_kv": 4, "attention.key_length": head}
    draft.keys |= {"attention.value_length": head, "rope.dimension_count": 64, "ssm.conv_kernel": 4}
    draft.keys |= {"ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32}
    draft.keys |= {"attention.recurrent_layers": flags, "rope.dimension_sections": [11, 11, 10, 0]}
    delta: Shapes = {
        "attn_norm.weight": (e,),
        "attn_qkv.weight": (e, 8192),
        "attn_gate.weight": (e, 4096),
        "ssm_conv1d.weight": (4, 8192),
        "ssm_dt.bias": (32,),
        "ssm_a": (32,),
        "ssm_beta.weight": (e, 32),
        "ssm_alpha.weight": (e, 32),
        "ssm_norm.weight": (128,),
        "ssm_out.weight": (4096, e),
    }
    full = attention(e, 4096, 1024) | {"attn_q.weight": (e, 8192)} | _norms(head)
    feed = {name: shape for name, shape in gated(e, ff).items() if name != "ffn_norm.weight"}
    feed |= {"post_attention_norm.weight": (e,)}
    for at in range(layers + ahead):
        draft.layer(at, delta if flags[at] else full, feed, _next_token(e) if at >= layers else {})
    return draft.family("Qwen3.5-9B")


def _minimax_01() -> Family:
    """MiniMax-Text-01: every eighth layer attends, the others have lightning attention; only its code knows."""
    e, q, ff = 6144, 8192, 9216
    draft = Draft("minimax-01", 80, e, 200064, feed_forward_length=ff, expert_count=32, expert_used_count=2)
    draft.keys |= {"attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 128}
    draft.keys |= {"attention.value_length": 128, "rope.dimension_count": 64, "residual_scale": 3.5}
    lightning: Shapes = {
        "attn_norm.weight": (e,),
        "attn_norm_2.weight": (q,),
        "attn_qkv.weight": (e, 3 * q),
        "attn_gate.weight": (e, q),
        "attn_output.weight": (q, e),
    }
    for at in range(80):
        draft.layer(at, attention(e, q, 1024) if at % 8 == 7 else lightning, _experts(e, ff, 32))
    return draft.family("MiniMax-Text-01")


def _jamba() -> Family:
    """Jamba-1.6-Mini: attention in one layer of eight, experts in every second."""
    e, ff = 4096, 14336
    full = range(4, 32, 8)
    draft = Draft("jamba", 32, e, 65536, feed_forward_length=ff, expert_count=16, expert_used_count=2)
    draft.keys |= {"attention.head_count": 32, "attention.head_count_kv": _per_layer(32, 8, full)}
    draft.keys |= {"ssm.conv_kernel": 4, "ssm.inner_size": 8192, "ssm.state_size": 16, "ssm.time_step_rank": 256}
    state = _mamba(e, inner=8192, state=16, rank=256) | {"attn_norm.weight": (e,), "ssm_dt_norm.weight": (256,)}
    state |= {"ssm_b_norm.weight": (16,), "ssm_c_norm.weight": (16,)}
    for at in range(32):
        feed = _experts(e, ff, 16) if at % 2 else gated(e, ff)
        draft.layer(at, attention(e, e, 1024) if at in full else state, feed)
    return draft.family("Jamba-1.6-Mini")


def _falcon_h1() -> Family:
    """Falcon-H1-1.5B: every layer has both."""
    e, ff, inner = 2048, 4096, 3072
    draft = Draft("falcon-h1", 24, e, 65536, feed_forward_length=ff, attention__head_count=8)
    draft.keys |= {"attention.head_count_kv": 2, "attention.key_length": 128, "attention.value_length": 128}
    draft.keys |= {"ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.state_size": 256, "ssm.group_count": 1}
    draft.keys |= {"ssm.time_step_rank": 48, "rope.dimension_count": 128}
    feed = {"ffn_norm": (e,)} | {name: shape for name, shape in gated(e, ff).items() if name != "ffn_norm.weight"}
    state = _mamba2(e, inner=inner, state=256, groups=1, heads=48, norm=False)
    for at in range(24):
        draft.layer(at, attention(e, 1024, 256), state, feed)
    return draft.family("Falcon-H1-1.5B")


def _granite_h() -> Family:
    """Granite-4.0-H-Tiny: four layers of forty attend."""
    e, full = 1536, (5, 15, 25, 35)
    draft = Draft("granitehybrid", 40, e, 100352, head=False, feed_forward_length=512, expert_count=64)
    draft.keys |= {"expert_used_count": 6, "expert_shared_feed_forward_length": 1024, "attention.head_count": 12}
    draft.keys |= {"attention.head_count_kv": _per_layer(40, 4, full), "rope.dimension_count": 128}
    draft.keys |= {"ssm.conv_kernel": 4, "ssm.inner_size": 3072, "ssm.state_size": 128, "ssm.group_count": 1}
    draft.keys |= {"ssm.time_step_rank": 48, "logit_scale": 6.0}
    state = _mamba2(e, inner=3072, state=128, groups=1, heads=48) | {"attn_norm.weight": (e,)}
    for at in range(40):
        draft.layer(at, attention(e, 1536, 512) if at in full else state, _experts(e, 512, 64, 1024))
    return draft.family("Granite-4.0-H-Tiny")


_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def _nemotron_h() -> Family:
    """Nemotron-H-8B: a layer is a state, or attention, or feed-forward and keeps nothing."""
    e, ff, layers = 4096, 21504, len(_NEMOTRON)
    full = [at for at, kind in enumerate(_NEMOTRON) if kind == "*"]
    feed = [at for at, kind in enumerate(_NEMOTRON) if kind == "-"]
    draft = Draft("nemotron_h", layers, e, 131072, feed_forward_length=_per_layer(layers, ff, feed))
    draft.keys |= {"attention.head_count": 32, "attention.head_count_kv": _per_layer(layers, 8, full)}
    draft.keys |= {"attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128}
    draft.keys |= {"ssm.conv_kernel": 4, "ssm.inner_size": 8192, "ssm.state_size": 128, "ssm.group_count": 8}
    draft.keys |= {"ssm.time_step_rank": 128, "attention.layer_norm_epsilon": 1e-5}
    state = _mamba2(e, inner=8192, state=128, groups=8, heads=128) | {"attn_norm.weight": (e,)}
    forward: Shapes = {"attn_norm.weight": (e,), "ffn_up.weight": (e, ff), "ffn_down.weight": (ff, e)}
    for at, kind in enumerate(_NEMOTRON):
        draft.layer(at, {"M": state, "*": attention(e, 4096, 1024), "-": forward}[kind])
    return draft.family("Nemotron-H-8B")


_NEMOTRON_3 = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def _nemotron_3() -> Family:
    """Nemotron-3-Nano-30B with a layer that predicts ahead: the engine keeps a cache for it, used or not."""
    e, ff, experts, layers = 2688, 1856, 128, len(_NEMOTRON_3) + 1
    full = [at for at, kind in enumerate(_NEMOTRON_3) if kind == "*"]
    feed = [at for at, kind in enumerate(_NEMOTRON_3) if kind == "E"]
    draft = Draft("nemotron_h_moe", layers, e, 131072, feed_forward_length=_per_layer(layers, ff, feed))
    draft.keys |= {"attention.head_count": 32, "attention.head_count_kv": _per_layer(layers, 2, [*full, layers - 1])}
    draft.keys |= {"attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128}
    draft.keys |= {"ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.group_count": 8}
    draft.keys |= {"ssm.time_step_rank": 64, "attention.layer_norm_epsilon": 1e-5, "expert_count": experts}
    draft.keys |= {"expert_used_count": 6, "expert_feed_forward_length": ff, "expert_gating_func": 2}
    draft.keys |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": 2 * ff, "nextn_predict_layers": 1}
    state = _mamba2(e, inner=4096, state=128, groups=8, heads=64) | {"attn_norm.weight": (e,)}
    forward = _experts(e, ff, experts, 2 * ff, norm=False, gate=False) | {"exp_probs_b.bias": (experts,)}
    own = attention(e, 4096, 256)
    for at, kind in enumerate(_NEMOTRON_3):
        draft.layer(at, {"M": state, "*": own, "E": forward | {"attn_norm.weight": (e,)}}[kind])
    ahead = _next_token(e) | {"nextn.shared_head_norm.weight": (e,), "post_attention_norm.weight": (e,)}
    draft.layer(layers - 1, own, forward, ahead)
    return draft.family("Nemotron-3-Nano-ahead")


def _lfm2() -> Family:
    """LFM2-1.2B: six layers of sixteen attend, the others are short convolutions."""
    e, ff, full = 2048, 8192, (2, 5, 8, 10, 12, 14)
    draft = Draft("lfm2", 16, e, 65536, head=False, feed_forward_length=ff, shortconv__l_cache=3)
    draft.keys |= {"attention.head_count": 32, "attention.head_count_kv": _per_layer(16, 8, full)}
    draft.tensors = [(name.replace("output_norm", "token_embd_norm"), s, kind) for name, s, kind in draft.tensors]
    short: Shapes = {
        "attn_norm.weight": (e,),
        "shortconv.conv.weight": (3, e),
        "shortconv.in_proj.weight": (e, 3 * e),
        "shortconv.out_proj.weight": (e, e),
    }
    for at in range(16):
        draft.layer(at, attention(e, e, 512) | _norms(64) if at in full else short, gated(e, ff))
    return draft.family("LFM2-1.2B")


# --------------------------------------------------------------------- other shapes


def _openelm() -> Family:
    """OpenELM-270M: heads and feed-forward width differ from layer to layer."""
    e, head = 1280, 64
    kv_heads = [3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5]
    ff = [768, 1024, 1280, 1536, 1792, 2048, 2560, 2816, 3072, 3328, 3584, 3840, 4352, 4608, 4864, 5120]
    heads = [4 * count for count in kv_heads]
    draft = Draft("openelm", 16, e, 32000, head=False, feed_forward_length=ff, attention__head_count=heads)
    draft.keys |= {"attention.head_count_kv": kv_heads, "attention.key_length": head, "attention.value_length": head}
    for at in range(16):
        draft.layer(at, _norms(head), gated(e, ff[at]), {"attn_norm.weight": (e,)})
        qkv = (heads[at] + 2 * kv_heads[at]) * head
        draft.layer(at, {"attn_qkv.weight": (e, qkv), "attn_output.weight": (heads[at] * head, e)})
    return draft.family("OpenELM-270M")


def _decilm() -> Family:
    """Like Llama-3.1-Nemotron-51B: layers with fewer heads, with a matrix in place of attention, with neither."""
    e, layers = 8192, 80
    kv_heads = [0 if at % 16 in (6, 7) else 4 if at % 16 == 11 else 8 for at in range(layers)]
    heads = [0 if at % 16 == 7 else 64 for at in range(layers)]
    ff = [0 if at % 20 == 13 else 14336 if at % 4 == 1 else 28672 for at in range(layers)]
    draft = Draft("deci", layers, e, 128256, feed_forward_length=ff, attention__head_count=heads)
    draft.keys |= {"attention.head_count_kv": kv_heads, "rope.dimension_count": 128}
    draft.add("rope_freqs.weight", 64)
    for at in range(layers):
        if kv_heads[at]:
            draft.layer(at, attention(e, 8192, kv_heads[at] * 128))
        elif heads[at]:
            draft.layer(at, {"attn_norm.weight": (e,), "attn_output.weight": (e, e)})
        if ff[at]:
            draft.layer(at, gated(e, ff[at]))
    return draft.family("Nemotron-51B")


def _bge_base() -> Family:
    """bge-base-en: an encoder keeps nothing."""
    e, ff = 768, 3072
    draft = Draft("bert", 12, e, 30522, head=False, feed_forward_length=ff, attention__causal=False)
    draft.keys |= {"context_length": 512, "pooling_type": 2, "attention.head_count": 12}
    draft.keys |= {"attention.layer_norm_epsilon": 1e-12}
    draft.tensors = draft.tensors[:1]
    draft.add("token_types.weight", e, 2)
    draft.add("position_embd.weight", e, 512)
    layer: Shapes = {name: shape for name, shape in attention(e, e, e).items() if name != "attn_norm.weight"}
    layer |= {f"attn_{name}.bias": (e,) for name in ("q", "k", "v", "output")}
    layer |= {"ffn_up.weight": (e, ff), "ffn_up.bias": (ff,), "ffn_down.weight": (ff, e), "ffn_down.bias": (e,)}
    norms = ("attn_output_norm", "layer_output_norm")
    layer |= {f"{name}.{part}": (e,) for name in norms for part in ("weight", "bias")}
    for part in ("weight", "bias"):
        draft.add(f"token_embd_norm.{part}", e)
    for at in range(12):
        draft.layer(at, layer)
    family = draft.family("bge-base-en")
    family.keys["tokenizer.ggml.token_type_count"] = 2
    return family


FAMILIES: tuple[Family, ...] = (
    _deepseek_v2_lite(compressed=True),
    _deepseek_v2_lite(compressed=False),
    _deepseek_v3("DeepSeek-V3"),
    _deepseek_v3("DeepSeek-V3.2", indexer=True),
    _glm_dsa(),
    _glm_47_flash(),
    _kimi_linear(),
    _gemma_3n(),
    _gemma_4("Gemma-4-E4B", layers=42, e=2560, ff=10240, heads=8, shared=18, small=256),
    _gemma_4("Gemma-4-31B", layers=60, e=5376, ff=21504, heads=32, shared=0, small=0),
    _gpt_oss(),
    _exaone_4(),
    _small_thinker(),
    _mimo_2(),
    _llama_4(),
    _phi_3(),
    _mamba_130m(),
    _mamba2_370m(),
    _rwkv_6(),
    _arwkv_7(),
    _qwen3_next(),
    _qwen_35(),
    _minimax_01(),
    _jamba(),
    _falcon_h1(),
    _granite_h(),
    _nemotron_h(),
    _nemotron_3(),
    _lfm2(),
    _openelm(),
    _decilm(),
    _bge_base(),
)
