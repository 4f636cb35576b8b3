"""How wide the state of a recurrent layer is: the same for every such layer of a model.

Source: llama_hparams::n_embd_r and n_embd_s, llama.cpp v0.5.0.
"""

from __future__ import annotations

from relevo.models import engine_rules as rules
from relevo.models.gguf import GgufHeader

_TOKEN_SHIFTS = 2


def state_widths(header: GgufHeader, heads: int, head_length: int) -> tuple[int, int]:
    """(convolution or shift state, state proper) of one layer and sequence, in elements.

    Told apart by the keys: RWKV states its head width, LFM2 the reach of its convolutions, Kimi's delta attention
    its head dimension, Mamba and the gated delta nets their inner and state sizes.
    """

    def of(key: str, otherwise: int = 0) -> int:
        value = header.count(f"{header.architecture}.{key}")
        return otherwise if value is None else value

    embedding, kernel = of("embedding_length"), of("ssm.conv_kernel")
    if of("wkv.head_size"):
        return of("token_shift_count", _TOKEN_SHIFTS) * embedding, embedding * of("wkv.head_size")
    if of("shortconv.l_cache"):
        return embedding * (of("shortconv.l_cache") - 1), 0
    if of("kda.head_dim"):
        inner = heads * of("kda.head_dim")
        return 3 * (kernel - 1 if kernel else 3) * inner, of("kda.head_dim") * inner
    groups = 0 if header.architecture in rules.IGNORES_GROUPS else of("ssm.group_count")
    conv = max(0, kernel - 1) * (of("ssm.inner_size") + 2 * groups * of("ssm.state_size"))
    if header.architecture == "minimax-01":  # lightning attention: a square a head
        return conv, head_length * head_length * heads
    return conv, of("ssm.state_size") * of("ssm.inner_size")
