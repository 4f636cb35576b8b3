"""What the engine knows of an architecture and no file tells: llama.cpp v0.5.0, src/models/*.cpp and llama-model.cpp.

A file decides wherever it says something; these are the defaults behind it. An architecture that is not listed in
ARCHITECTURES has not been read, and nothing is claimed about what it keeps.
"""

from __future__ import annotations

import msgspec


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Window(msgspec.Struct, frozen=True):
    """Which layers slide where no array says so: all but every `period`-th; 0: all of them; None: the file must say."""

    period: int | None = None
    first_is_full: bool = False
    """The full layer of a period comes first, else last."""
    default_tokens: int = 0
    """The window where the file states none; 0: then nothing slides."""
    fixed_tokens: int | None = None
    """The window whatever the file states."""
    layers: int | None = None
    """Only in models of so many layers."""


WINDOWS: dict[str, Window] = {
    "afmoe": Window(4),
    "cohere2": Window(4),
    "cohere2moe": Window(4, first_is_full=True),
    "exaone-moe": Window(4),
    "exaone4": Window(4, default_tokens=4096, layers=64),
    "gemma-embedding": Window(6),
    "gemma2": Window(2, default_tokens=4096),
    "gemma3": Window(6),
    "gemma3n": Window(5),
    "gemma4": Window(),
    "gpt-oss": Window(2),
    "granite_swa": Window(),
    "laguna": Window(4, first_is_full=True),
    "lfm2": Window(0),
    "llama4": Window(4, default_tokens=8192, fixed_tokens=8192),
    "maple": Window(),
    "mellum": Window(4),
    "mimo2": Window(),
    "modern-bert": Window(3, first_is_full=True),
    "muse-glimmer": Window(4),
    "olmo2": Window(4),
    "plamo3": Window(8),
    "smallthinker": Window(4, first_is_full=True, fixed_tokens=4096),
    "spark2_5": Window(),
    "step35": Window(),
}
"""Architectures whose graph has windows at all; a window stated by any other (Mistral, Phi-3) is not used."""

KEEPS_NOTHING = _words(
    "bert dream eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llada llada-moe modern-bert neo-bert nomic-bert "
    "nomic-bert-moe rnd1"
)
"""Encoders and diffusion models: they see a whole text at once, and no cache is made for them."""

HAS_NO_HEAD = (KEEPS_NOTHING - {"dream", "gemma-embedding", "llada", "llada-moe", "rnd1"}) | {"bitnet"}
"""Never turn results into words, or use the embedding table where it lies: no device gets a copy of it."""

LAYERS_WITH_CACHE = {"gemma3n": 20}
"""The later layers read an earlier one's cache; other files state how many do (`attention.shared_kv_layers`)."""
READS_SHARED_LAYERS = frozenset({"gemma4"})

IGNORES_GROUPS = frozenset({"mamba", "jamba"})
"""Their state has no groups, whatever `ssm.group_count` says."""

LINEAR_ATTENTION_PERIOD = {"minimax-01": 8, "qwen35": 4, "qwen35moe": 4, "qwen3next": 4}
"""Every n-th layer keeps keys and values, the others a state, unless the file tells another period or each layer."""

ATTENDS_WITHOUT_FEED_FORWARD = frozenset({"nemotron_h", "nemotron_h_moe"})
"""A layer of these attends only where the file states no feed-forward width for it."""

READS_TIED_TABLE_TWICE = frozenset({"gemma3n", "gemma4"})
"""Ask for the head before the table that it is, and get two of it where the file is not mapped."""

LOADED_OF_LAYERS_AHEAD: dict[str, tuple[str, ...]] = {
    "deepseek32": ("exp_probs_b.bias",),
    "glm-dsa": ("exp_probs_b.bias",),
}
"""What is loaded of a layer that predicts ahead although nothing of it is used."""

READS_KEY_LENGTH_AGAIN = frozenset({"plamo2"})
"""Take the head width from the file even where the first layer has no attention."""

ARCHITECTURES = (
    _words(
        "afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet bloom chameleon chatglm "
        "codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 dots1 "
        "ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma3n gemma4 glm-dsa "
        "glm4 glm4moe gpt-oss gpt2 gptneox granite granite_swa granitehybrid granitemoe grok grovemoe "
        "hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais jais2 jamba kimi-linear laguna lfm2 lfm2moe llama "
        "llama-embed llama4 maincoder mamba mamba2 maple mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2 mistral3 "
        "mistral4 mpt muse-glimmer nemotron nemotron_h nemotron_h_moe olmo olmo2 olmoe openelm orion paddleocr "
        "pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe "
        "qwen3moe qwen3next qwen3vl qwen3vlmoe refact rwkv6 rwkv6qwen2 rwkv7 seed_oss smallthinker smollm3 spark2_5 "
        "stablelm starcoder starcoder2 step35 talkie xverse"
    )
    | KEEPS_NOTHING
)

UNUSUAL_KEYS: dict[str, str] = {
    "attention.compress_ratios": "It keeps compressed caches of several kinds.",
    "hyper_connection.count": "Its layers are joined by hyper-connections.",
    "attention.indexer.block_size": "Its sparse attention keeps a cache of blocks.",
    "attention.kv_lora_rank_swa": "Its compressed rows have two widths.",
    "ple.layers": "It keeps a history for its embeddings by layer.",
    "num_loops": "Its layers are run more than once, each time with a cache of its own.",
    "hrm.layers_per_stack": "Its layers are run more than once.",
    "adapters.count": "It carries adapters, whose router keeps a cache of its own.",
    "decoder_block_count": "It has an encoder and a decoder.",
    "target_layers": "It is a draft that shares another model's caches.",
    "posnet.block_count": "It makes sound, not text.",
}
"""Keys of files whose caches the engine lays out in a way of their own, which the formulas do not describe."""

ATTENTION_KEYS = _words(
    "head_count head_count_kv max_alibi_bias clamp_kqv key_length value_length layer_norm_epsilon "
    "layer_norm_rms_epsilon group_norm_epsilon group_norm_groups causal q_lora_rank kv_lora_rank decay_lora_rank "
    "iclr_lora_rank value_residual_mix_lora_rank gate_lora_rank relative_buckets_count sliding_window "
    "sliding_window_pattern rope_pattern scale output_scale value_scale temperature_length temperature_scale "
    "key_length_mla value_length_mla key_length_swa value_length_swa key_length_mla_swa value_length_mla_swa "
    "kv_lora_rank_swa indexer.head_count indexer.key_length indexer.top_k indexer.block_size indexer.local_blocks "
    "indexer.types output_group_count output_lora_rank compress_rope_freq_base compress_ratios shared_kv_layers "
    "recurrent_layers"
)
"""All keys under `attention.` that this engine has; a file with another one is of a later kind."""
