"""Caches, states and placement as pure formulas over a shape."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relevo.core.events import StartModel
from relevo.core.memory.demand import DEVICE_START, load_options, model_demand
from relevo.core.memory.kv_cache import cells_of, kv_layer_bytes, rows_of, state_layer_bytes, window_cells_of
from relevo.core.memory.load import LoadOptions
from relevo.core.memory.placement import repacked_bytes, weights_bytes
from relevo.core.memory.repack import X86_TYPES, instructions_in, repacked_types
from relevo.core.memory.shape import LayerShape, ModelShape

FULL = LayerShape(
    weights_bytes=1000, expert_bytes=600, padding_bytes=24, heads=8, kv_heads=2, key_length=64, value_length=64
)
SLIDES = msgspec.structs.replace(FULL, slides=True)
STATE = LayerShape(weights_bytes=500, holds_kv=False, conv_state=30, mixer_state=70)


def model(*layers: LayerShape, **changes: object) -> ModelShape:
    plain = ModelShape(
        architecture="llama",
        embedding=512,
        vocabulary_tokens=1000,
        context_trained_tokens=None,
        layers=layers,
        input_weights_bytes=100,
        output_weights_bytes=40,
    )
    return msgspec.structs.replace(plain, **changes)


def host(**changes: object) -> LoadOptions:
    return LoadOptions(on_device=False, **changes)  # type: ignore[arg-type]


def card(**changes: object) -> LoadOptions:
    return LoadOptions(on_device=True, **changes)  # type: ignore[arg-type]


def test_cells_come_in_steps_and_a_strict_slot_has_its_own() -> None:
    assert cells_of(host(context_tokens=1)) == (1, 256)
    assert cells_of(host(context_tokens=8000, sequences=4)) == (1, 8192)
    assert cells_of(host(context_tokens=8000, sequences=4, shared_cells=False)) == (4, 8192)


def test_a_micro_batch_has_no_more_rows_than_there_is_context() -> None:
    assert rows_of(host(context_tokens=100, ubatch_tokens=512)) == 100
    assert rows_of(host(context_tokens=100, ubatch_tokens=512, sequences=3, shared_cells=False)) == 300
    assert rows_of(host(context_tokens=4096, ubatch_tokens=512, batch_tokens=64)) == 64


def test_windows_are_kept_for_each_sharer_and_never_longer_than_the_context() -> None:
    windowed = model(SLIDES, window_tokens=1000)
    options = {"context_tokens": 32768, "ubatch_tokens": 100}
    assert window_cells_of(windowed, host(**options)) == 1280
    assert window_cells_of(windowed, host(**options, sequences=4)) == 4352
    assert window_cells_of(windowed, host(**options, sequences=4, shared_cells=False)) == 1280
    assert window_cells_of(windowed, host(context_tokens=512)) == 512
    assert window_cells_of(model(FULL), host(**options)) == 32768


def test_transposed_values_are_as_wide_as_the_widest() -> None:
    """Without flash attention; a layer whose attention is gone from the model pays too."""
    shape = model(FULL, msgspec.structs.replace(FULL, kv_heads=1), msgspec.structs.replace(FULL, kv_heads=0))
    assert kv_layer_bytes(shape, host(context_tokens=256)) == [256 * 512, 256 * 256, 0]
    transposed = host(context_tokens=256, flash_attention=False)
    assert kv_layer_bytes(shape, transposed) == [256 * (256 + 256), 256 * (128 + 256), 256 * 256]


def test_an_indexer_keeps_a_key_beside_the_row() -> None:
    latent = LayerShape(heads=16, kv_heads=1, key_length=576, value_length=0)
    sparse = msgspec.structs.replace(latent, indexer_key_length=128)
    assert kv_layer_bytes(model(latent, sparse), host(context_tokens=256)) == [256 * 1152, 256 * (1152 + 256)]
    assert kv_layer_bytes(model(latent), host(context_tokens=256, flash_attention=False)) == [256 * 1152]


def test_a_layer_that_reads_anothers_cache_has_none() -> None:
    shape = model(FULL, msgspec.structs.replace(FULL, holds_kv=False))
    assert kv_layer_bytes(shape, host(context_tokens=256)) == [256 * 512, 0]


PHI_2 = msgspec.structs.replace(FULL, kv_heads=32, key_length=80, value_length=80)


@pytest.mark.parametrize(
    ("layer", "options", "words"),
    [
        (FULL, {"kv_type": "q9_9"}, "is not known"),
        (FULL, {"kv_type": "q4_k"}, "heads are 64 wide, and 256 are one block"),
        (PHI_2, {"kv_type": "q8_0"}, "heads are 80 wide, and 32 are one block"),
        (FULL, {"kv_type": "q8_0", "flash_attention": False}, "needs flash attention"),
    ],
)
def test_a_cache_that_the_engine_would_not_make_is_not_computed(
    layer: LayerShape, options: dict[str, object], words: str
) -> None:
    """A row of 2560 would hold whole blocks, but each head of it must."""
    found = kv_layer_bytes(model(layer), host(**options))
    assert isinstance(found, str)
    assert words in found
    assert model_demand(model(layer), host(**options))[1].total_bytes is None


def test_states_depend_on_sequences_alone() -> None:
    shape = model(STATE, FULL)
    assert state_layer_bytes(shape, host(sequences=3, context_tokens=100_000, kv_type="q8_0")) == [4 * 3 * 100, 0]
    assert state_layer_bytes(shape, host(sequences=3, shared_cells=False)) == [1200, 0]
    _, here = model_demand(shape, host(sequences=3, context_tokens=256))
    assert (here.kv_bytes, here.state_bytes) == (256 * 512, 1200)


def test_states_lie_where_their_layer_lies() -> None:
    device, here = model_demand(model(STATE, STATE, FULL), card(gpu_layers=3, context_tokens=256))
    assert (device.state_bytes, here.state_bytes) == (400, 400)
    assert (device.kv_bytes, here.kv_bytes) == (256 * 512, 0)


# ----------------------------------------------------------------------- placement


def test_experts_of_the_first_layers_on_the_card_may_stay_behind() -> None:
    shape = model(FULL, FULL, FULL)
    assert weights_bytes(shape, card()) == (3 * 1024 + 40, 100)
    assert weights_bytes(shape, card(host_expert_layers=2)) == (3 * 1024 + 40 - 1200, 100 + 1200)
    assert weights_bytes(shape, card(gpu_layers=3, host_expert_layers=1)) == (2 * 1024 + 40 - 600, 100 + 1000 + 600)
    assert weights_bytes(shape, card(host_expert_layers=99)) == (3 * 1024 + 40 - 1800, 1900)


def test_tables_of_positions_are_on_both_sides_only_where_layers_are() -> None:
    shape = model(FULL, FULL, rotary_bytes=8)
    assert weights_bytes(shape, card()) == (2 * 1024 + 40 + 8, 100)
    assert weights_bytes(shape, card(gpu_layers=2)) == (1024 + 40 + 8, 100 + 1000 + 8)
    assert weights_bytes(shape, card(gpu_layers=1)) == (40, 100 + 2000 + 8)
    assert weights_bytes(shape, host()) == (0, 100 + 2000 + 40 + 8)


def test_some_tied_tables_are_on_the_host_twice_where_the_file_is_read() -> None:
    shape = model(FULL, tied_table_bytes=90, tied_table_is_read_twice=True)
    assert weights_bytes(shape, host())[1] == 1140
    assert weights_bytes(shape, host(use_mmap=False))[1] == 1230
    assert weights_bytes(shape, card(use_mmap=False)) == (1024 + 40 + 90, 100)


# -------------------------------------------------------------- mapped and private


def test_mapped_pages_are_not_private_and_what_is_read_is() -> None:
    _, mapped = model_demand(model(FULL), host())
    assert mapped.mapped_bytes == mapped.weights_bytes == 1140
    assert mapped.private_bytes == mapped.known_bytes - 1140
    _, read = model_demand(model(FULL), host(use_mmap=False))
    assert (read.mapped_bytes, read.private_bytes) == (0, read.known_bytes)
    assert read.known_bytes == mapped.known_bytes


def test_repacked_weights_are_a_second_copy_where_the_file_is_mapped() -> None:
    """A Q4_K_M requantisation of the demo model: 98.87 MiB mapped, and 7.59 MiB of q4_k once more."""
    shape = model(FULL, repackable_bytes={"q4_k": 300, "q6_k": 500}, tied_table_bytes=200, tied_table_type="q8_0")
    options = host(repacked_types=X86_TYPES)
    _, here = model_demand(shape, options)
    assert (here.weights_bytes, here.mapped_bytes, here.spent_bytes) == (1440, 1140, 300)
    assert here.private_bytes == here.known_bytes - 840
    assert here.known_bytes == sum(value or 0 for value in here.parts().values()) - 300, "read once, and never again"
    read = msgspec.structs.replace(options, use_mmap=False)
    assert repacked_bytes(shape, read) == 0
    assert repacked_bytes(msgspec.structs.replace(shape, tied_table_type="q4_k"), read) == 200
    assert repacked_bytes(shape, card(repacked_types=X86_TYPES)) == 0


def test_only_the_fast_profile_repacks_and_only_where_it_is_asked() -> None:
    start = StartModel("m", "cpu", "/m.gguf", "/lib")
    for change, expected in (({}, X86_TYPES), ({"repack": False}, frozenset()), ({"profile": "strict"}, frozenset())):
        options = load_options(msgspec.structs.replace(start, **change), on_device=False, learned=DEVICE_START["cpu"])
        assert options.repacked_types == expected


def test_what_a_processor_repacks_follows_from_its_instructions() -> None:
    assert "q2_k" not in repacked_types(["sse4_2", "avx2"])
    assert repacked_types(["avx2", "avx512f"]) == X86_TYPES
    assert "q8_0" in repacked_types(["asimddp"])
    assert "q6_k" in repacked_types(["avx2", "amx_int8"])
    assert repacked_types(["sse4_2"]) == frozenset()
    assert instructions_in("processor\t: 0\nflags\t\t: fpu avx2\nvmx flags\t: amx_int8\n") == {"fpu", "avx2"}
    assert instructions_in("Features\t: fp asimd asimddp\n") == {"fp", "asimd", "asimddp"}


def test_the_mapping_of_a_load_is_the_workers() -> None:
    start = StartModel("m", "gpu", "/m.gguf", "/lib", use_mmap=False, host_expert_layers=5)
    options = load_options(start, on_device=True, learned=DEVICE_START["nvidia"])
    assert (options.use_mmap, options.host_expert_layers) == (False, 5)


# ------------------------------------------------------------------------- in general

LAYERS = st.lists(st.sampled_from([FULL, SLIDES, STATE]), min_size=1, max_size=12)
OPTIONS = st.builds(
    LoadOptions,
    on_device=st.just(True),
    gpu_layers=st.integers(0, 14),
    host_expert_layers=st.integers(0, 14),
    context_tokens=st.integers(1, 1 << 17),
    sequences=st.integers(1, 16),
    shared_cells=st.booleans(),
    ubatch_tokens=st.sampled_from([16, 128, 512]),
    kv_type=st.sampled_from(["f16", "q8_0", "q4_0"]),
)


@given(LAYERS, OPTIONS)
def test_nothing_is_lost_between_the_two_sides(layers: list[LayerShape], options: LoadOptions) -> None:
    shape = model(*layers, window_tokens=512)
    device, here = model_demand(shape, options)
    _, alone = model_demand(shape, msgspec.structs.replace(options, on_device=False))
    assert (device.kv_bytes or 0) + (here.kv_bytes or 0) == alone.kv_bytes
    assert (device.state_bytes or 0) + (here.state_bytes or 0) == alone.state_bytes
    padding = sum(layer.padding_bytes for layer in layers)
    assert 0 <= (device.weights_bytes or 0) + (here.weights_bytes or 0) - (alone.weights_bytes or 0) <= padding


@given(LAYERS, OPTIONS, st.integers(0, 4096), st.integers(0, 4))
def test_more_context_or_more_sequences_never_take_less(
    layers: list[LayerShape], options: LoadOptions, more_tokens: int, more_sequences: int
) -> None:
    shape = model(*layers, window_tokens=512)
    larger = msgspec.structs.replace(
        options,
        context_tokens=options.context_tokens + more_tokens,
        sequences=options.sequences + more_sequences,
    )
    for ask in (kv_layer_bytes, state_layer_bytes):
        small, large = ask(shape, options), ask(shape, larger)
        assert not isinstance(small, str)
        assert not isinstance(large, str)
        assert all(a <= b for a, b in zip(small, large, strict=True))
