"""Proof that a GPU route is on the GPU: that the layers asked for, and their weights, are where they were sent.

The engine places layers as it is told, but a tensor that a device cannot use (of a type it does not know, or larger
than it allows one buffer to be, as 128 MiB on software Vulkan) goes to the host with a word in a debug line only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from relevo.core.errors import ModelFileError
from relevo.core.events import StartModel
from relevo.core.units import size_text
from relevo.models.gguf import read_header
from relevo.workers.llama.native import Native
from relevo.workers.llama.native_log import LoadFacts

LANDED_SHARE: Final = 0.9
"""Of the layers' weights. A backend may always leave some small tensors to the CPU: that is slower, not wrong."""
_LAYER: Final = re.compile(r"blk\.(\d+)\.")


def what_did_not_land(native: Native, handle: Any, start: StartModel, *, dry: bool) -> str | None:
    """A sentence where less is on the device than was asked for. In a dry run no bytes are there to be counted."""
    total = int(native.call.llama_model_n_layer(handle)) + 1
    if found := native.log.find(r"offloaded (\d+)/(\d+) layers to GPU"):
        total = int(found[2])
    asked = total if start.gpu_layers < 0 else min(start.gpu_layers, total)
    landed = sum(device == start.device for device in native.log.facts.placed.values())
    if landed < asked:
        return f"Only {landed} of {asked} layers of the model landed on {start.device}."
    if dry or asked == 0:
        return None
    there = native.log.buffer_bytes("model", start.device) or 0
    wanted = sent_bytes(Path(start.path), native.log.facts, start.device)
    if there == 0 or there < LANDED_SHARE * wanted:
        return (
            f"Only {size_text(there)} of {size_text(wanted)} of weights landed on {start.device}: it cannot use the "
            f"other tensors, by their type or their size."
        )
    return None


def sent_bytes(path: Path, facts: LoadFacts, device: str) -> int:
    """Weights of the repeating layers that were sent to this device; 0 where the file cannot tell.

    Layers for multi-token prediction are in the file and not loaded; what was told to stay on the host is not sent.
    """
    try:
        header = read_header(path)
    except ModelFileError:
        return 0  # the engine reads it, so there is nothing to complain of
    ahead = header.count(f"{header.architecture}.nextn_predict_layers") or 0
    loaded = (header.count(f"{header.architecture}.block_count") or 0) - ahead
    kept_back = set(facts.overridden)
    size = 0
    for tensor in header.tensors:
        found = _LAYER.match(tensor.name)
        layer = int(found[1]) if found else -1
        if 0 <= layer < loaded and facts.placed.get(layer) == device and tensor.name not in kept_back:
            size += tensor.size_bytes
    return size
