"""A model's graph of one step, as sizes: which tensors are computed, from which, and in which order.

Only what decides memory is here: shapes, views, what may be computed in place, and where a tensor that exists before
the graph lies. The order is llama.cpp's: a tensor is visited after its sources, from left to right, when the graph
is expanded by it (ggml_build_forward_expand, ggml.c of llama.cpp v0.5.0).
"""

from __future__ import annotations

from enum import IntEnum

Shape = tuple[int, ...]


class Place(IntEnum):
    """Whose memory a tensor lies in; the number is the backend's rank, the device's first."""

    DEVICE = 0
    HOST = 1


class Kind(IntEnum):
    """What the allocator and the placement must know of an operation."""

    LEAF = 0  # not computed: an input, a weight, a cache
    VIEW = 1  # another shape of the same bytes
    FRESH = 2  # needs memory of its own
    IN_PLACE = 3  # may take a source's memory over (ggml_op_can_inplace)


class Tensor:
    """A node or a leaf. `root`: whose bytes a view shows. `place` is set where it exists before the graph."""

    __slots__ = (
        "bytes",
        "children",
        "floating",
        "input",
        "kernel_bytes",
        "kind",
        "offset",
        "output",
        "owned",
        "place",
        "root",
        "rows",
        "shape",
        "sources",
        "strides",
        "views",
        "weight",
        "where",
    )

    def __init__(self, kind: Kind, shape: Shape, size: int, sources: tuple[Tensor, ...] = ()) -> None:
        self.kind = kind
        self.shape = shape
        self.bytes = size
        self.sources = sources
        self.root: Tensor | None = None
        self.strides: object = None
        """None: contiguous; else something equal only to itself."""
        self.place: Place | None = None
        self.weight = False
        self.input = False
        self.output = False
        self.floating = False
        """Its sources' weights do not decide where it is computed (ROPE, FLASH_ATTN_EXT)."""
        self.kernel_bytes = 0
        """What a device's kernel wants beside the result, in the same block."""
        self.rows = 0
        """Rows by which a device decides whether to take the operation from the host; 0: it never does."""
        self.where: Place | None = None
        self.children = self.views = 0
        self.owned = False
        self.offset = 0


class Graph:
    """Collects tensors in the order in which they are computed."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self._seen: set[int] = set()

    @property
    def count(self) -> int:
        """Tensors in it, computed or not."""
        return len(self.nodes) + len(self.leaves)

    def expand(self, tensor: Tensor) -> Tensor:
        """Add a tensor and all it needs; returns it."""
        if id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            for source in tensor.sources:
                self.expand(source)
            (self.leaves if tensor.kind == Kind.LEAF else self.nodes).append(tensor)
        return tensor


def given(shape: Shape, size: int) -> Tensor:
    """An input of the step: written by the host before it starts."""
    tensor = Tensor(Kind.LEAF, shape, size)
    tensor.input = True
    return tensor


def stored(place: Place, size: int = 0, weight: bool = False) -> Tensor:
    """A weight or a cache: it exists before the graph, in this place."""
    tensor = Tensor(Kind.LEAF, (), size)
    tensor.place = place
    tensor.weight = weight
    return tensor


def computed(shape: Shape, *sources: Tensor, element_bytes: int = 4, in_place: bool = False) -> Tensor:
    """The result of an operation, contiguous; its rows are those of all dimensions but the first."""
    count = 1
    for length in shape:
        count *= length
    tensor = Tensor(Kind.IN_PLACE if in_place else Kind.FRESH, shape, count * element_bytes, sources)
    tensor.rows = count // shape[0] if count else 0
    return tensor


def viewed(source: Tensor, shape: Shape, *, straight: bool = True, size: int | None = None) -> Tensor:
    """The same bytes in another shape. `straight`: still contiguous. `size`: its own extent, if not all of them."""
    tensor = Tensor(Kind.VIEW, shape, source.bytes if size is None else size, (source,))
    tensor.root = source.root or source
    tensor.strides = source.strides if straight else object()
    return tensor


def written(target: Tensor, *sources: Tensor) -> Tensor:
    """An operation whose result is a part of what exists already: new rows of a cache."""
    tensor = Tensor(Kind.FRESH, (), target.bytes, (*sources, target))
    tensor.root = target.root or target
    tensor.rows = 1
    return tensor
