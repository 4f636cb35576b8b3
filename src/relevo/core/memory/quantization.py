"""How ggml stores numbers: every type in blocks of some elements and some bytes.

Source: `ggml_type` in ggml.h and `GGML_QUANT_SIZES` in gguf-py, llama.cpp v0.5.0. Numbers that are missing here
were removed from the format.
"""

from __future__ import annotations

import msgspec


class NumberType(msgspec.Struct, frozen=True):
    """One ggml type: `block_elements` numbers take `block_bytes` bytes; rows are whole blocks."""

    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row. Raises ValueError when it is not a whole number of blocks."""
        if elements % self.block_elements:
            raise ValueError(f"A row of {elements} elements is not a multiple of {self.name}'s {self.block_elements}.")
        return elements // self.block_elements * self.block_bytes


NUMBER_TYPES: dict[int, NumberType] = {
    number: NumberType(name, block_elements, block_bytes)
    for number, name, block_elements, block_bytes in (
        (0, "f32", 1, 4),
        (1, "f16", 1, 2),
        (2, "q4_0", 32, 18),
        (3, "q4_1", 32, 20),
        (6, "q5_0", 32, 22),
        (7, "q5_1", 32, 24),
        (8, "q8_0", 32, 34),
        (9, "q8_1", 32, 36),
        (10, "q2_k", 256, 84),
        (11, "q3_k", 256, 110),
        (12, "q4_k", 256, 144),
        (13, "q5_k", 256, 176),
        (14, "q6_k", 256, 210),
        (15, "q8_k", 256, 292),
        (16, "iq2_xxs", 256, 66),
        (17, "iq2_xs", 256, 74),
        (18, "iq3_xxs", 256, 98),
        (19, "iq1_s", 256, 50),
        (20, "iq4_nl", 32, 18),
        (21, "iq3_s", 256, 110),
        (22, "iq2_s", 256, 82),
        (23, "iq4_xs", 256, 136),
        (24, "i8", 1, 1),
        (25, "i16", 1, 2),
        (26, "i32", 1, 4),
        (27, "i64", 1, 8),
        (28, "f64", 1, 8),
        (29, "iq1_m", 256, 56),
        (30, "bf16", 1, 2),
        (34, "tq1_0", 256, 54),
        (35, "tq2_0", 256, 66),
        (39, "mxfp4", 32, 17),
        (40, "nvfp4", 64, 36),
        (41, "q1_0", 128, 18),
        (42, "q2_0", 64, 18),
    )
}

BY_NAME: dict[str, NumberType] = {kind.name: kind for kind in NUMBER_TYPES.values()}
