"""From what a client asked to what will be run: prompt tokens, effective sampling, limits of each answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from relevo.config import ModelConfig, SamplingConfig
from relevo.core.errors import BadRequest
from relevo.core.events import Ask, Sampling, TextReady
from relevo.replicas.text import TextProcess

SEED_BITS = 64
Number = TypeVar("Number", int, float)


def effective_seed(seed: int | None, random_bits: Callable[[int], int]) -> int:
    """The client's seed as 64 bits, or one drawn now; it is stored with the acceptance."""
    return random_bits(SEED_BITS) if seed is None else seed % 2**SEED_BITS


def effective_sampling(ask: Ask, defaults: SamplingConfig, random_bits: Callable[[int], int]) -> Sampling:
    """What the request leaves out comes from the model's configuration."""

    def chosen(asked: Number | None, default: Number) -> Number:
        return default if asked is None else asked

    return Sampling(
        seed=effective_seed(ask.seed, random_bits),
        temperature=chosen(ask.temperature, defaults.temperature),
        top_k=chosen(ask.top_k, defaults.top_k),
        top_p=chosen(ask.top_p, defaults.top_p),
        min_p=chosen(ask.min_p, defaults.min_p),
        repeat_penalty=chosen(ask.repeat_penalty, defaults.repeat_penalty),
        frequency_penalty=chosen(ask.frequency_penalty, defaults.frequency_penalty),
        presence_penalty=chosen(ask.presence_penalty, defaults.presence_penalty),
        penalty_last_tokens=defaults.penalty_last_tokens,
        logit_bias=ask.logit_bias,
    )


def wanted_outputs(ask: Ask, model: ModelConfig) -> tuple[int, ...]:
    """Output limit of each choice, before admission reduces a default to what fits."""
    limit = model.max_output_tokens if ask.max_output_tokens is None else ask.max_output_tokens
    return (limit,) * ask.n


def effective_policy(ask: Ask, model: ModelConfig) -> str:
    """Which routes it may take: as the request or its key says, else as the model's configuration does."""
    return model.policy if ask.policy is None else ask.policy


def handover_wish(ask: Ask, model: ModelConfig) -> str:
    """How a handover of a started answer is to be handled: as the client says, else as the operator configured."""
    return model.handover if ask.handover == "auto" else ask.handover


def check_tokens(tokens: list[int], text: TextReady, param: str) -> None:
    """Token ids a client sent by itself. Raises BadRequest with the range."""
    if not tokens:
        raise BadRequest("The prompt is empty: send at least one token.", param=param)
    worst = next((t for t in tokens if not 0 <= t < text.vocabulary_tokens), None)
    if worst is not None:
        raise BadRequest(
            f"Token id {worst} is not in this model's vocabulary: ids run from 0 to {text.vocabulary_tokens - 1}.",
            param=param,
        )


async def prompt_tokens_of(ask: Ask, text: TextProcess) -> list[int]:
    """Render and count the prompt, once. Raises BadRequest where the template or the text is refused."""
    ready = await text.wait_ready()
    bias = next((t for t in ask.logit_bias if not 0 <= t < ready.vocabulary_tokens), None)
    if bias is not None:
        raise BadRequest(
            f"logit_bias names token {bias}, but this model's ids run from 0 to {ready.vocabulary_tokens - 1}.",
            param="logit_bias",
        )
    if ask.kind == "chat":
        tokens = (await text.render(ask.messages or [], ask.tools, ask.variables)).tokens
    elif isinstance(ask.prompt, str):
        tokens = (await text.tokenize(ask.prompt)).tokens
    else:
        tokens = list(ask.prompt or [])
    check_tokens(tokens, ready, "messages" if ask.kind == "chat" else "prompt")
    return tokens
