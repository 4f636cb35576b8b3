"""The form of a decoder's graph: what a file tells by the tensors it holds, and the engine's code knows beside."""

from __future__ import annotations

import msgspec

from relevo.core.described import Described


class FeedForward(Described):
    """How a layer's feed-forward part is laid out in the file."""

    GATED = "gated", "Three matrices: ffn_gate, ffn_up and ffn_down."
    FUSED = "fused", "Two matrices: ffn_up holds gate and up together."
    PLAIN = "plain", "Two matrices and no gate: ffn_up and ffn_down."
    EXPERTS = "experts", "Gate, up and down of many experts, of which a few are chosen for each token."


class Residual(Described):
    """How a layer's two parts are joined."""

    SEQUENTIAL = "sequential", "The feed-forward part works on the sum of input and attention."
    SHARED_NORM = "shared-norm", "Both parts work on the same normed input."
    OWN_NORM = "own-norm", "Both parts work on the input, each through a norm of its own."


class Turned(Described):
    """Which layers' queries and keys are turned by their positions (RoPE)."""

    ALL = "all", "Those of every layer."
    WINDOWED = "windowed", "Those of layers that see a window only."
    THREE_OF_FOUR = "three-of-four", "Those of every layer but each fourth."


class GraphForm(msgspec.Struct, frozen=True, kw_only=True):
    """What of the graph the file tells by its tensors and keys; the same for every layer."""

    residual: Residual = Residual.SEQUENTIAL
    feed_forward: FeedForward = FeedForward.GATED
    layer_norm: bool = False
    """LayerNorm, which needs memory of its own; else RMS norm, in place."""
    norm_bias: bool = False
    fused_qkv: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    qk_norms: bool = False
    wide_qk_norms: bool = False
    """Those norms span all heads together."""
    pre_norms: bool = True
    """A norm before attention and feed-forward part."""
    post_norms: bool = False
    """A norm behind attention and feed-forward part, before they are added."""
    feed_forward_bias: bool = False
    expert_bias: bool = False
    normed_weights: bool = False
    """The chosen experts' weights are divided by their sum."""
    chosen_softmax: bool = False
    """The softmax is over the chosen experts only."""
    windowed: bool = False
    """Two caches, one of them for the layers that see a window."""
    late_rows: bool = False
    """Rows without an output are dropped after the last layer instead of inside it."""
    input_first: bool = False
    """The feed-forward part is added to the layer's sum, not the sum to it."""
    attention_first: bool = False
    """Of parts that work side by side the attention is summed with the other before the input is."""
    turned: Turned = Turned.ALL
    still_steps_a_layer: int = 0
    """Steps of a layer that are computed in place and change no size: scales, an activation in two steps."""
    still_steps: int = 0
    """Such steps outside the layers."""
    positions: int = 1
    """Numbers that say where a token is: 1, or 4 where pictures have rows and columns."""
    head_bias: bool = False
    rope_factors: bool = False
    """Positions are turned by factors of the file."""
    sinks: bool = False
    """The softmax has an extra column, a weight a head."""
