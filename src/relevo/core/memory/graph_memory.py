"""What a graph takes in each place: ggml's placement and ggml's allocator, replayed on sizes.

The buffer is not the sum of what lives at once: blocks are handed out best fit, freed blocks merge, a large tensor may
not fit a hole. The peak follows from the order, so the order is replayed. Sources: ggml_backend_sched_split_graph in
ggml-backend.cpp and ggml-alloc.c, llama.cpp v0.5.0. Not replayed: several devices (pipeline copies), and devices that
reorder the graph.
"""

from __future__ import annotations

from relevo.core.memory.graph import Graph, Kind, Place, Tensor, computed, viewed

ALIGNMENT_BYTES = {Place.DEVICE: 128, Place.HOST: 32}
"""Of CUDA's buffers, and of the CPU's own (also pinned)."""
SHIPPED_ROWS = 32
"""From so many rows on a device takes an operation whose weights lie on the host (CUDA, Vulkan)."""
_ENDLESS = 1 << 62


def graph_bytes(graph: Graph, on_device: bool) -> tuple[int, int]:
    """(on the device, on the host): the buffers that this graph needs."""
    if not on_device:
        for tensor in (*graph.leaves, *graph.nodes):
            tensor.where = Place.HOST
        return _allocate(graph.nodes, graph.leaves)
    _place(graph)
    return _allocate(_with_copies(graph.nodes), graph.leaves)


# ------------------------------------------------------------------ placement


def _place(graph: Graph) -> None:
    """Give every tensor its place: by what exists, by weights, then by its neighbours, the device first."""
    for leaf in graph.leaves:
        leaf.where = Place.HOST if leaf.input else leaf.place
    work = [node for node in graph.nodes if node.kind != Kind.VIEW]
    for node in graph.nodes:
        node.where = _own_place(node)
    for nodes in (work, work[::-1]):
        _spread(nodes, device_only=True)
    for nodes in (work, work[::-1]):
        _spread(nodes, device_only=False)
    for node in graph.nodes:
        if node.where is None and node.root is not None:
            node.where = node.root.where
        for source in node.sources:
            if source.where is None:
                source.where = source.root.where if source.root is not None else node.where


def _own_place(node: Tensor) -> Place | None:
    if node.root is not None and node.root.place is not None:
        return node.root.place
    if node.kind == Kind.VIEW or node.floating:
        return None
    for source in node.sources:
        if source.weight:
            shipped = source.place == Place.HOST and node.rows >= SHIPPED_ROWS
            return Place.DEVICE if shipped else source.place
    return None


def _spread(nodes: list[Tensor], device_only: bool) -> None:
    """A node without a place takes that of the node before it in this order."""
    current: Place | None = None
    for node in nodes:
        if node.where is None:
            node.where = current
        else:
            current = None if device_only and node.where == Place.HOST else node.where


def _with_copies(nodes: list[Tensor]) -> list[Tensor]:
    """The order of allocation: each run of nodes in one place begins with copies of what lies in the other."""
    order: list[Tensor] = []
    run: list[Tensor] = []
    inputs: list[tuple[Tensor, Tensor]] = []
    copies: dict[tuple[int, Place], Tensor] = {}
    current = next(node.where for node in nodes if node.kind != Kind.VIEW)

    def close() -> None:
        for source, copy in inputs:
            held = viewed(source, source.shape)
            held.kind = Kind.LEAF  # keeps the original alive until it is copied, and is nothing itself
            held.where = source.where
            order.extend((held, copy))
        order.extend(run)
        inputs.clear()
        run.clear()

    for node in nodes:
        if node.kind == Kind.VIEW:
            run.append(node)
            continue
        assert node.where is not None
        if node.where != current or (inputs and any(s.weight and s.where != current for s in node.sources)):
            close()
            current = node.where
        sources = list(node.sources)
        for index, source in enumerate(sources):
            if source.where == current:
                continue
            copied = copies.get((id(source), node.where))
            if copied is None:
                copied = copies[id(source), node.where] = computed((source.bytes,), element_bytes=1)
                copied.shape, copied.strides, copied.where = source.shape, source.strides, node.where
                inputs.append((source, copied))
            sources[index] = copied
        node.sources = tuple(sources)
        run.append(node)
    close()
    return order


# ------------------------------------------------------------------ allocation


class _Blocks:
    """Free blocks of one buffer by address, as [offset, size]; `peak` is what the buffer must have."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._free = [[0, _ENDLESS]]
        self.peak = 0

    def take(self, size: int) -> int:
        """Best fit among the holes, the later of equals; else the end."""
        size = -(-size // self._alignment) * self._alignment
        free = self._free
        best, best_size = len(free) - 1, _ENDLESS
        for index in range(len(free) - 1):
            if size <= free[index][1] <= best_size:
                best, best_size = index, free[index][1]
        block = free[best]
        offset = block[0]
        block[0] += size
        block[1] -= size
        if not block[1]:
            del free[best]
        self.peak = max(self.peak, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free, merged with the neighbours."""
        size = -(-size // self._alignment) * self._alignment
        free = self._free
        index = 0
        while index < len(free) and free[index][0] < offset:
            index += 1
        if index and free[index - 1][0] + free[index - 1][1] == offset:
            block = free[index - 1]
            block[1] += size
            if index < len(free) and block[0] + block[1] == free[index][0]:
                block[1] += free[index][1]
                del free[index]
        elif index < len(free) and offset + size == free[index][0]:
            free[index][0] = offset
            free[index][1] += size
        else:
            free.insert(index, [offset, size])


class _Allocator:
    """One pass over the nodes (ggml_gallocr_alloc_graph_impl)."""

    def __init__(self) -> None:
        self.blocks = {place: _Blocks(alignment) for place, alignment in ALIGNMENT_BYTES.items()}

    def allocate(self, tensor: Tensor) -> None:
        if tensor.owned or tensor.root is not None or tensor.place is not None:
            return
        tensor.owned = True
        if tensor.kind == Kind.IN_PLACE and (parent := _takes_over(tensor)) is not None:
            tensor.where, tensor.offset = parent.where, parent.offset
            parent.owned = False
            return
        assert tensor.where is not None
        tensor.offset = self.blocks[tensor.where].take(_block_bytes(tensor))

    def release(self, tensor: Tensor) -> None:
        """One user of the tensor is done; frees it, or what it shows, after the last."""
        tensor.children -= 1
        if tensor.children or tensor.views:
            return
        root = tensor.root
        if root is None:
            self._free(tensor)
        else:
            root.views -= 1
            if not root.views and not root.children:
                self._free(root)

    def _free(self, tensor: Tensor) -> None:
        if tensor.owned and not tensor.output:
            assert tensor.where is not None
            self.blocks[tensor.where].give(tensor.offset, _block_bytes(tensor))
            tensor.owned = False


def _block_bytes(tensor: Tensor) -> int:
    return tensor.bytes + (tensor.kernel_bytes if tensor.where is Place.DEVICE else 0)


def _takes_over(node: Tensor) -> Tensor | None:
    for parent in node.sources:
        if (
            parent.owned
            and not parent.output
            and parent.children == 1
            and not parent.views
            and parent.shape == node.shape
            and parent.strides == node.strides
            and parent.bytes == node.bytes
        ):
            return parent
    return None


def _allocate(nodes: list[Tensor], leaves: list[Tensor]) -> tuple[int, int]:
    allocator = _Allocator()
    for leaf in leaves:
        allocator.allocate(leaf)
    for node in nodes:
        if node.root is not None and node.kind != Kind.LEAF:
            node.root.views += 1
        for source in node.sources:
            source.children += 1
    for node in nodes:
        for source in node.sources:
            allocator.allocate(source)
        allocator.allocate(node)
        for source in node.sources:
            allocator.release(source)
    return allocator.blocks[Place.DEVICE].peak, allocator.blocks[Place.HOST].peak
