"""Attention families at their real dimensions: keys and tensors as converters write them, weights as holes.

What a file holds is what the closed form may look at, so these carry every tensor the engine asks for, and no name
tells more than the file does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.golden.header_file import Scalar, Tensor, write_header

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One model file. `tensors` are complete; `keys` lack nothing but the tokenizer."""

    name: str
    keys: dict[str, Scalar | Sequence[Scalar]]
    tensors: tuple[Tensor, ...]
    value_types: tuple[str, ...] = ("f16", "q8_0", "q4_0")
    """Cache types its head width allows."""

    def write(self, folder: Path) -> Path:
        """The header-only file, in this folder."""
        return write_header(folder / f"{self.name}.gguf", self.keys, self.tensors)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A decoder of equal layers; `family` draws it. Widths in elements. Fields as in the files' keys."""

    name: str
    architecture: str
    layers: int
    embedding: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    head: int = 0
    """Width of a head; 0: embedding / heads."""
    tied: bool = False
    context: int = 131072
    weights: str = "q4_k"
    norm_bias: bool = False
    layer_norm: bool = False
    without: tuple[str, ...] = ()
    """Layer tensors of the plain llama that this one lacks."""
    with_: tuple[tuple[str, Shape], ...] = ()
    """Layer tensors that it has beside; vectors are f32."""
    outside: tuple[tuple[str, Shape], ...] = ()
    more: dict[str, Scalar | Sequence[Scalar]] = field(default_factory=dict)
    """Further keys, without the architecture's prefix."""
    kind_of: Callable[[str, int], str] | None = None
    """Number type of a matrix by name and layer; None: `weights` for all."""

    def family(self) -> Family:
        head = self.head or self.embedding // self.heads
        q, kv = self.heads * head, self.kv_heads * head
        e, ff = self.embedding, self.feed_forward
        plain: tuple[tuple[str, Shape], ...] = (
            ("attn_norm.weight", (e,)),
            ("attn_q.weight", (e, q)),
            ("attn_k.weight", (e, kv)),
            ("attn_v.weight", (e, kv)),
            ("attn_output.weight", (q, e)),
            ("ffn_norm.weight", (e,)),
            ("ffn_gate.weight", (e, ff)),
            ("ffn_up.weight", (e, ff)),
            ("ffn_down.weight", (ff, e)),
        )
        layer = [(name, shape) for name, shape in plain if name not in self.without] + list(self.with_)
        tensors = [
            self._tensor("token_embd.weight", (e, self.vocabulary)),
            self._tensor("output_norm.weight", (e,)),
            *([] if self.tied else [self._tensor("output.weight", (e, self.vocabulary))]),
            *(self._tensor(name, shape) for name, shape in self.outside),
        ]
        tensors += [self._tensor(f"blk.{i}.{name}", shape, i) for i in range(self.layers) for name, shape in layer]
        return Family(
            self.name,
            self._keys(head),
            tuple(tensors),
            ("f16", "q8_0", "q4_0") if head % 32 == 0 else ("f16",),
        )

    def _tensor(self, name: str, shape: Shape, layer: int = 0) -> Tensor:
        if len(shape) == 1 or name.endswith(".bias"):
            return name, shape, "f32"
        if "ffn_gate_inp" in name:
            return name, shape, "f32"
        return name, shape, self.kind_of(name, layer) if self.kind_of else self.weights

    def _keys(self, head: int) -> dict[str, Scalar | Sequence[Scalar]]:
        prefix = self.architecture
        own: dict[str, Scalar | Sequence[Scalar]] = {
            "vocab_size": self.vocabulary,
            "context_length": self.context,
            "embedding_length": self.embedding,
            "block_count": self.layers,
            "feed_forward_length": self.feed_forward,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "rope.dimension_count": head,
            "rope.freq_base": 10000.0,
            "attention.layer_norm_epsilon" if self.layer_norm else "attention.layer_norm_rms_epsilon": 1e-5,
        }
        if self.head:
            own |= {"attention.key_length": head, "attention.value_length": head}
        own |= self.more
        return {
            "general.architecture": prefix,
            "general.name": self.name,
            **{f"{prefix}.{name}": value for name, value in own.items()},
        }


def _more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's choice of layers that keep more bits (llama-quant.cpp, use_more_bits)."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def q4_k_m(layers: int) -> Callable[[str, int], str]:
    """Number types of a Q4_K_M file of an ordinary llama: head and some of the V and down matrices in q6_k."""

    def kind(name: str, layer: int) -> str:
        careful = ("attn_v.weight", "ffn_down.weight")
        return "q6_k" if name == "output.weight" or (name.endswith(careful) and _more_bits(layer, layers)) else "q4_k"

    return kind


def _qk_norms(head: int) -> tuple[tuple[str, Shape], ...]:
    return (("attn_q_norm.weight", (head,)), ("attn_k_norm.weight", (head,)))


def _post_norms(e: int) -> tuple[tuple[str, Shape], ...]:
    return (("post_attention_norm.weight", (e,)), ("post_ffw_norm.weight", (e,)))


def _experts(e: int, ff: int, count: int) -> tuple[tuple[str, Shape], ...]:
    return (
        ("ffn_gate_inp.weight", (e, count)),
        ("ffn_gate_exps.weight", (e, ff, count)),
        ("ffn_up_exps.weight", (e, ff, count)),
        ("ffn_down_exps.weight", (ff, e, count)),
    )


_DENSE = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
_SEPARATE = ("attn_q.weight", "attn_k.weight", "attn_v.weight")

LLAMA_2_7B = Blueprint("Llama-2-7B", "llama", 32, 4096, 11008, 32, 32, 32000, context=4096)
_FACTORS = (("rope_freqs.weight", (64,)),)
LLAMA_31_8B = Blueprint("Llama-3.1-8B", "llama", 32, 4096, 14336, 32, 8, 128256, kind_of=q4_k_m(32), outside=_FACTORS)
LLAMA_32_1B = Blueprint(
    "Llama-3.2-1B", "llama", 16, 2048, 8192, 32, 8, 128256, tied=True, outside=(("rope_freqs.weight", (32,)),)
)
LLAMA_33_70B = Blueprint("Llama-3.3-70B", "llama", 80, 8192, 28672, 64, 8, 128256, outside=_FACTORS)
SMOLLM2_135M = Blueprint("SmolLM2-135M", "llama", 30, 576, 1536, 9, 3, 49152, tied=True, context=8192, weights="q4_1")
MISTRAL_NEMO = Blueprint("Mistral-Nemo-12B", "llama", 40, 5120, 14336, 32, 8, 131072, head=128)
QWEN25_05B = Blueprint(
    "Qwen2.5-0.5B",
    "qwen2",
    24,
    896,
    4864,
    14,
    2,
    151936,
    tied=True,
    weights="q8_0",
    with_=(("attn_q.bias", (896,)), ("attn_k.bias", (128,)), ("attn_v.bias", (128,))),
)
QWEN3_06B = Blueprint(
    "Qwen3-0.6B", "qwen3", 28, 1024, 3072, 16, 8, 151936, head=128, tied=True, with_=_qk_norms(128), weights="q8_0"
)
QWEN3_4B = Blueprint("Qwen3-4B", "qwen3", 36, 2560, 9728, 32, 8, 151936, head=128, tied=True, with_=_qk_norms(128))
QWEN3_14B = Blueprint("Qwen3-14B", "qwen3", 40, 5120, 17408, 40, 8, 151936, head=128, with_=_qk_norms(128))
GEMMA_2_9B = Blueprint(
    "Gemma-2-9B",
    "gemma2",
    42,
    3584,
    14336,
    16,
    8,
    256000,
    head=256,
    tied=True,
    context=8192,
    with_=_post_norms(3584),
    more={
        "attention.sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA_3_12B = Blueprint(
    "Gemma-3-12B",
    "gemma3",
    48,
    3840,
    15360,
    16,
    8,
    262208,
    head=256,
    tied=True,
    with_=_qk_norms(256) + _post_norms(3840),
    more={"attention.sliding_window": 1024},
)
COMMAND_R_35B = Blueprint(
    "Command-R-35B",
    "command-r",
    40,
    8192,
    22528,
    64,
    64,
    256000,
    tied=True,
    layer_norm=True,
    without=("ffn_norm.weight",),
    more={"logit_scale": 0.0625},
)
PHI_3_MINI = Blueprint(
    "Phi-3-mini",
    "phi3",
    32,
    3072,
    8192,
    32,
    32,
    32064,
    context=4096,
    without=(*_SEPARATE, *_DENSE),
    with_=(("attn_qkv.weight", (3072, 9216)), ("ffn_up.weight", (3072, 16384)), ("ffn_down.weight", (8192, 3072))),
    more={"attention.sliding_window": 2047},
)
PHI_4 = Blueprint(
    "Phi-4",
    "phi3",
    40,
    5120,
    17920,
    40,
    10,
    100352,
    context=16384,
    without=(*_SEPARATE, *_DENSE),
    with_=(("attn_qkv.weight", (5120, 7680)), ("ffn_up.weight", (5120, 35840)), ("ffn_down.weight", (17920, 5120))),
)
STABLELM_2_16B = Blueprint(
    "StableLM-2-1.6B",
    "stablelm",
    24,
    2048,
    5632,
    32,
    32,
    100352,
    context=4096,
    layer_norm=True,
    with_=(
        ("attn_norm.bias", (2048,)),
        ("ffn_norm.bias", (2048,)),
        ("attn_q.bias", (2048,)),
        ("attn_k.bias", (2048,)),
        ("attn_v.bias", (2048,)),
    ),
    outside=(("output_norm.bias", (2048,)),),
    more={"use_parallel_residual": False, "rope.dimension_count": 16},
)
PYTHIA_69B = Blueprint(
    "Pythia-6.9B",
    "gptneox",
    32,
    4096,
    16384,
    32,
    32,
    50432,
    context=2048,
    layer_norm=True,
    without=(*_SEPARATE, "ffn_gate.weight"),
    with_=(
        ("attn_norm.bias", (4096,)),
        ("ffn_norm.bias", (4096,)),
        ("attn_qkv.weight", (4096, 12288)),
        ("attn_qkv.bias", (12288,)),
        ("attn_output.bias", (4096,)),
        ("ffn_up.bias", (16384,)),
        ("ffn_down.bias", (4096,)),
    ),
    outside=(("output_norm.bias", (4096,)),),
    more={"use_parallel_residual": True, "rope.dimension_count": 32},
)
MIXTRAL_8X7B = Blueprint(
    "Mixtral-8x7B",
    "llama",
    32,
    4096,
    14336,
    32,
    8,
    32000,
    context=32768,
    without=_DENSE,
    with_=_experts(4096, 14336, 8),
    more={"expert_count": 8, "expert_used_count": 2},
)
QWEN3_30B_A3B = Blueprint(
    "Qwen3-30B-A3B",
    "qwen3moe",
    48,
    2048,
    6144,
    32,
    4,
    151936,
    head=128,
    without=_DENSE,
    with_=_qk_norms(128) + _experts(2048, 768, 128),
    more={"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768},
)
GPT_OSS_20B = Blueprint(
    "gpt-oss-20b",
    "gpt-oss",
    24,
    2880,
    2880,
    64,
    8,
    201088,
    head=64,
    weights="q8_0",
    without=(*_DENSE, "ffn_norm.weight"),
    with_=(
        ("post_attention_norm.weight", (2880,)),
        ("attn_q.bias", (4096,)),
        ("attn_k.bias", (512,)),
        ("attn_v.bias", (512,)),
        ("attn_output.bias", (2880,)),
        ("attn_sinks.weight", (64,)),
        *_experts(2880, 2880, 32),
        ("ffn_gate_inp.bias", (32,)),
        ("ffn_gate_exps.bias", (2880, 32)),
        ("ffn_up_exps.bias", (2880, 32)),
        ("ffn_down_exps.bias", (2880, 32)),
    ),
    kind_of=lambda name, layer: "mxfp4" if "exps.weight" in name else "q8_0",
    more={
        "expert_count": 32,
        "expert_used_count": 4,
        "expert_feed_forward_length": 2880,
        "attention.sliding_window": 128,
    },
)


def _norm_biases(e: int) -> tuple[tuple[str, Shape], ...]:
    return (("attn_norm.bias", (e,)), ("ffn_norm.bias", (e,)))


_TWO_MATRICES = ("ffn_gate.weight",)
_PRE_NORMS = ("attn_norm.weight", "ffn_norm.weight")
_NORM_BIAS = "output_norm.bias"

GEMMA_2B = Blueprint("Gemma-2B", "gemma", 18, 2048, 16384, 8, 1, 256000, head=256, tied=True, context=8192)
GRANITE_33_8B = Blueprint(
    "Granite-3.3-8B",
    "granite",
    40,
    4096,
    12800,
    32,
    8,
    49159,
    tied=True,
    more={"logit_scale": 16.0, "residual_scale": 0.22, "embedding_scale": 12.0, "attention.scale": 0.0078125},
)
INTERNLM_25_7B = Blueprint("InternLM2.5-7B", "internlm2", 32, 4096, 14336, 32, 8, 92544)
MISTRAL_SMALL_32 = Blueprint("Mistral-Small-3.2-24B", "mistral3", 40, 5120, 32768, 32, 8, 131072, head=128)
SMOLLM3_3B = Blueprint("SmolLM3-3B", "smollm3", 36, 2048, 11008, 16, 4, 128256, tied=True)
STARCODER2_7B = Blueprint(
    "StarCoder2-7B",
    "starcoder2",
    32,
    4608,
    18432,
    36,
    4,
    49152,
    context=16384,
    layer_norm=True,
    without=_TWO_MATRICES,
    with_=(
        *_norm_biases(4608),
        ("attn_q.bias", (4608,)),
        ("attn_k.bias", (512,)),
        ("attn_v.bias", (512,)),
        ("attn_output.bias", (4608,)),
        ("ffn_up.bias", (18432,)),
        ("ffn_down.bias", (4608,)),
    ),
    outside=((_NORM_BIAS, (4608,)),),
)
PHI_2 = Blueprint(
    "Phi-2",
    "phi2",
    32,
    2560,
    10240,
    32,
    32,
    51200,
    context=2048,
    layer_norm=True,
    without=(*_TWO_MATRICES, "ffn_norm.weight"),
    with_=(
        ("attn_norm.bias", (2560,)),
        ("attn_q.bias", (2560,)),
        ("attn_k.bias", (2560,)),
        ("attn_v.bias", (2560,)),
        ("attn_output.bias", (2560,)),
        ("ffn_up.bias", (10240,)),
        ("ffn_down.bias", (2560,)),
    ),
    outside=((_NORM_BIAS, (2560,)), ("output.bias", (51200,))),
    more={"rope.dimension_count": 32},
)
COMMAND_R7B = Blueprint(
    "Command-R7B",
    "cohere2",
    32,
    4096,
    14336,
    32,
    8,
    256000,
    tied=True,
    layer_norm=True,
    without=("ffn_norm.weight",),
    more={"logit_scale": 0.25, "attention.sliding_window": 4096},
)
EXAONE_35_78B = Blueprint("EXAONE-3.5-7.8B", "exaone", 32, 4096, 14336, 32, 8, 102400, outside=_FACTORS)
EXAONE_4_32B = Blueprint(
    "EXAONE-4.0-32B",
    "exaone4",
    64,
    5120,
    27392,
    40,
    8,
    102400,
    head=128,
    without=_PRE_NORMS,
    with_=_qk_norms(128) + _post_norms(5120),
    outside=_FACTORS,
    more={"attention.sliding_window": 4096},
)
OLMO2_7B = Blueprint(
    "OLMo-2-7B",
    "olmo2",
    32,
    4096,
    11008,
    32,
    32,
    100352,
    context=4096,
    without=_PRE_NORMS,
    with_=_qk_norms(4096) + _post_norms(4096),
)
OLMOE_7B = Blueprint(
    "OLMoE-1B-7B",
    "olmoe",
    16,
    2048,
    1024,
    16,
    16,
    50304,
    context=4096,
    without=_DENSE,
    with_=_qk_norms(2048) + _experts(2048, 1024, 64),
    more={"expert_count": 64, "expert_used_count": 8},
)
SEED_OSS_36B = Blueprint(
    "Seed-OSS-36B",
    "seed_oss",
    64,
    5120,
    27648,
    80,
    8,
    155136,
    head=128,
    without=("ffn_norm.weight",),
    with_=(
        ("post_attention_norm.weight", (5120,)),
        ("attn_q.bias", (10240,)),
        ("attn_k.bias", (1024,)),
        ("attn_v.bias", (1024,)),
    ),
)
ARCEE_45B = Blueprint("AFM-4.5B", "arcee", 36, 2560, 18432, 20, 4, 128000, without=_TWO_MATRICES)
NEMOTRON_MINI_4B = Blueprint(
    "Nemotron-Mini-4B",
    "nemotron",
    32,
    3072,
    9216,
    24,
    8,
    256000,
    context=4096,
    layer_norm=True,
    without=_TWO_MATRICES,
    with_=_norm_biases(3072),
    outside=((_NORM_BIAS, (3072,)),),
    more={"rope.dimension_count": 64},
)
ERNIE_45_03B = Blueprint(
    "ERNIE-4.5-0.3B", "ernie4_5", 18, 1024, 3072, 16, 2, 103424, head=128, tied=True, weights="q8_0"
)
MINICPM_2B = Blueprint(
    "MiniCPM-2B",
    "minicpm",
    40,
    2304,
    5760,
    36,
    36,
    122753,
    tied=True,
    context=4096,
    weights="q8_0",
    more={"logit_scale": 9.0, "residual_scale": 0.2214, "embedding_scale": 12.0},
)

PHI_35_MINI = replace(
    PHI_3_MINI,
    name="Phi-3.5-mini-128k",
    context=131072,
    outside=(("rope_factors_long.weight", (48,)), ("rope_factors_short.weight", (48,))),
    more={"rope.scaling.original_context_length": 4096},
)
QWEN25_VL_7B = Blueprint(
    "Qwen2.5-VL-7B",
    "qwen2vl",
    28,
    3584,
    18944,
    28,
    4,
    152064,
    with_=(("attn_q.bias", (3584,)), ("attn_k.bias", (512,)), ("attn_v.bias", (512,))),
    more={"rope.dimension_sections": (16, 24, 24, 0)},
)

GLM_4_9B = Blueprint(
    "GLM-4-9B-0414",
    "glm4",
    40,
    4096,
    13696,
    32,
    2,
    151552,
    head=128,
    context=32768,
    weights="q8_0",
    without=(*_TWO_MATRICES, "ffn_up.weight"),
    with_=(
        ("ffn_up.weight", (4096, 27392)),
        ("attn_q.bias", (4096,)),
        ("attn_k.bias", (256,)),
        ("attn_v.bias", (256,)),
        *_post_norms(4096),
    ),
    more={"rope.dimension_count": 64},
)
GRANITE_31_MOE_1B = Blueprint(
    "Granite-3.1-1B-A400M",
    "granitemoe",
    24,
    1024,
    512,
    16,
    8,
    49155,
    tied=True,
    without=_DENSE,
    with_=_experts(1024, 512, 32),
    more={
        "expert_count": 32,
        "expert_used_count": 8,
        "logit_scale": 6.0,
        "residual_scale": 0.22,
        "embedding_scale": 12.0,
        "attention.scale": 0.015625,
    },
)
ORION_14B = Blueprint(
    "Orion-14B",
    "orion",
    40,
    5120,
    15360,
    40,
    40,
    84608,
    context=4096,
    layer_norm=True,
    with_=_norm_biases(5120),
    outside=((_NORM_BIAS, (5120,)),),
)

BLUEPRINTS = tuple(thing for thing in list(globals().values()) if isinstance(thing, Blueprint))
_FIRST_OF_MORE = BLUEPRINTS.index(GEMMA_2B)
FAMILIES = tuple(blueprint.family() for blueprint in BLUEPRINTS[:_FIRST_OF_MORE])
"""The families most people run, compared over every setting."""
MORE_FAMILIES = tuple(blueprint.family() for blueprint in BLUEPRINTS[_FIRST_OF_MORE:])
"""Further graphs, compared over a few settings; `python -m tests.golden` compares them over all."""


def family(name: str) -> Family:
    """The family of this name."""
    return next(found for found in (*FAMILIES, *MORE_FAMILIES) if found.name == name)


def shorter(blueprint: Blueprint, layers: int) -> Family:
    """The same model with fewer layers: its compute buffer is the same."""
    return replace(blueprint, layers=layers).family()
