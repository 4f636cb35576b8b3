"""A stand-in for an accelerator: a ggml device of our own that claims it can do everything, and computes nothing.

The engine plans for it as for a card: weights, cache and compute buffers go to its buffer type, what the host keeps
goes to its pinned host buffers, and large products of layers left to the host are shipped to it. No driver and no
card are needed, and every answer is known. Sizes have no padding of a particular card's kernels but the `cuda`
flavour's: the f16 copy of a quantized cache that its flash attention takes (ggml-cuda/fattn.cu).

Structures: ggml-backend-impl.h and ggml.h of llama.cpp v0.5.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from relevo.core.memory.dry_run import STAND_IN, STAND_IN_CUDA
from relevo.core.memory.quantization import NUMBER_TYPES
from relevo.workers.llama.native import Native, find_library

HOST_NAME: Final = "Accelerator_Host"
ALIGNMENT_BYTES: Final = 128  # CUDA's
HOST_ALIGNMENT_BYTES: Final = 32  # of CUDA's pinned memory, and of the CPU's own
OFFLOAD_ROWS: Final = 32  # from so many rows on CUDA and Vulkan take a product whose weights lie on the host
MEMORY_BYTES: Final = 1 << 44
_GPU: Final = 1

_STRUCTURES = """
struct ggml_tensor {
    int32_t type; void * buffer; int64_t ne[4]; size_t nb[4]; int32_t op; int32_t op_params[16]; int32_t flags;
    struct ggml_tensor * src[10]; struct ggml_tensor * view_src; size_t view_offs; void * data; char name[64];
    void * extra; char padding[8];
};
struct buft {
    const char * (*get_name)(void *); void * (*alloc_buffer)(void *, size_t); size_t (*get_alignment)(void *);
    size_t (*get_max_size)(void *); size_t (*get_alloc_size)(void *, const struct ggml_tensor *);
    bool (*is_host)(void *); void * device; void * context;
};
struct buffer_i {
    void (*free_buffer)(void *); void * (*get_base)(void *); void * init_tensor; void * memset_tensor;
    void * set_tensor; void * get_tensor; void * set_tensor_2d; void * get_tensor_2d; void * cpy_tensor;
    void (*clear)(void *, uint8_t); void * reset;
};
struct backend {
    void * guid; const char * (*get_name)(void *); void (*free)(void *); void * rest[14]; void * device;
    void * context;
};
struct props {
    const char * name; const char * description; size_t memory_free; size_t memory_total; int32_t type;
    const char * device_id; bool async; bool host_buffer; bool buffer_from_host_ptr; bool events; bool mmap_support;
};
struct device {
    const char * (*get_name)(void *); const char * (*get_description)(void *);
    void (*get_memory)(void *, size_t *, size_t *); int32_t (*get_type)(void *);
    void (*get_props)(void *, struct props *); void * (*init_backend)(void *, const char *);
    void * (*get_buffer_type)(void *); void * (*get_host_buffer_type)(void *); void * buffer_from_host_ptr;
    bool (*supports_op)(void *, const struct ggml_tensor *); bool (*supports_buft)(void *, void *);
    bool (*offload_op)(void *, const struct ggml_tensor *); void * event_new; void * event_free;
    void * event_synchronize; void * reg; void * context;
};
struct reg {
    int api_version; const char * (*get_name)(void *); size_t (*get_device_count)(void *);
    void * (*get_device)(void *, size_t); void * get_proc_address; void * context;
};
void * ggml_backend_buffer_init(void * buft, struct buffer_i iface, void * context, size_t size);
size_t ggml_nbytes(const struct ggml_tensor * tensor);
const char * ggml_op_name(int32_t op);
"""


class Accelerator:
    """The device; `handle` is its address. It must stay alive as long as the process."""

    def __init__(self, base_library: Path, cuda: bool = False, watch: Any = None) -> None:
        import cffi

        self._ffi = ffi = cffi.FFI()
        ffi.cdef(_STRUCTURES)
        self._base = ffi.dlopen(str(base_library))
        self._cuda, self._watch = cuda, watch
        self._alive: list[Any] = []
        self._operations: dict[int, str] = {}
        self._device = ffi.new("struct device *")
        self.name = STAND_IN_CUDA if cuda else STAND_IN
        self._buffers = self._buffer_type(self.name)
        self._host_buffers = self._buffer_type(HOST_NAME, host=True)
        self._fill_device()
        self.handle = int(ffi.cast("uintptr_t", self._device))

    def _text(self, pointer: Any) -> str:
        return str(self._ffi.string(pointer).decode())

    def _operation(self, tensor: Any) -> str:
        number = tensor.op
        if number not in self._operations:
            self._operations[number] = self._text(self._base.ggml_op_name(number))
        return self._operations[number]

    def _keep(self, thing: Any) -> Any:
        self._alive.append(thing)
        return thing

    def _function(self, signature: str, function: Any) -> Any:
        return self._keep(self._ffi.callback(signature, function))

    def _named(self, name: str) -> Any:
        text = self._keep(self._ffi.new("char[]", name.encode()))
        return self._function("const char *(void *)", lambda _: text)

    def _buffer_type(self, name: str, host: bool = False) -> Any:
        ffi = self._ffi
        kind = self._keep(ffi.new("struct buft *"))
        kind.get_name = self._named(name)
        kind.alloc_buffer = self._function("void *(void *, size_t)", self._allocate)
        alignment = HOST_ALIGNMENT_BYTES if host else ALIGNMENT_BYTES
        kind.get_alignment = self._function("size_t(void *)", lambda _: alignment)
        if host:
            kind.is_host = self._function("bool(void *)", lambda _: True)
        else:
            kind.get_alloc_size = self._function("size_t(void *, const struct ggml_tensor *)", self._size)
        kind.device = self._device
        return kind

    def _allocate(self, kind: Any, size_bytes: int) -> Any:
        """A buffer without memory: nothing is ever written to it in a dry run."""
        interface = self._ffi.new("struct buffer_i *")
        interface.free_buffer = self._function("void(void *)", lambda _: None)
        interface.get_base = self._function("void *(void *)", lambda _: self._ffi.cast("void *", 1 << 40))
        interface.clear = self._function("void(void *, uint8_t)", lambda *_: None)
        return self._base.ggml_backend_buffer_init(kind, interface[0], self._ffi.NULL, size_bytes)

    def _size(self, _kind: Any, tensor: Any) -> int:
        size = int(self._base.ggml_nbytes(tensor))
        if not self._cuda or self._operation(tensor) != "FLASH_ATTN_EXT":
            return size
        for cache in (tensor.src[1], tensor.src[2]):
            if NUMBER_TYPES[cache.type].block_elements > 1:
                size = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                size += 2 * cache.ne[0] * cache.ne[1] * cache.ne[2] * cache.ne[3]
        return size

    def _supports(self, _device: Any, tensor: Any) -> bool:
        if self._watch is not None:
            self._watch(self._ffi, self._operation(tensor), tensor)
        return True

    def _wants(self, _device: Any, tensor: Any) -> bool:
        """As CUDA: products of many rows, whose weights are then copied for the step."""
        operation = self._operation(tensor)
        if operation == "GET_ROWS":
            return False
        if operation == "MUL_MAT":
            rows = tensor.ne[1]
        elif operation in ("MUL_MAT_ID", "ROPE"):
            rows = tensor.ne[2]
        else:
            rows = tensor.ne[1] * tensor.ne[2] * tensor.ne[3]
        return bool(rows >= OFFLOAD_ROWS)

    def _properties(self, device: Any, properties: Any) -> None:
        properties.name = self._device.get_name(device)
        properties.description = self._device.get_description(device)
        properties.memory_free = properties.memory_total = MEMORY_BYTES
        properties.type = _GPU
        properties.device_id = self._ffi.NULL
        setattr(properties, "async", True)
        properties.host_buffer = True
        properties.buffer_from_host_ptr = False
        properties.events = False
        properties.mmap_support = False

    def _memory(self, _device: Any, free: Any, total: Any) -> None:
        free[0] = total[0] = MEMORY_BYTES

    def _backend(self, _device: Any, _parameters: Any) -> Any:
        backend = self._keep(self._ffi.new("struct backend *"))
        backend.guid = self._keep(self._ffi.new("char[16]", b"stand-in"))
        backend.get_name = self._named(self.name)
        backend.free = self._function("void(void *)", lambda _: None)
        backend.device = self._device
        return backend

    def _fill_device(self) -> None:
        ffi, device = self._ffi, self._device
        device.get_name = self._named(self.name)
        device.get_description = self._named("a stand-in that computes nothing")
        device.get_memory = self._function("void(void *, size_t *, size_t *)", self._memory)
        device.get_type = self._function("int32_t(void *)", lambda _: _GPU)
        device.get_props = self._function("void(void *, struct props *)", self._properties)
        device.init_backend = self._function("void *(void *, const char *)", self._backend)
        device.get_buffer_type = self._function("void *(void *)", lambda _: self._buffers)
        device.get_host_buffer_type = self._function("void *(void *)", lambda _: self._host_buffers)
        device.supports_op = self._function("bool(void *, const struct ggml_tensor *)", self._supports)
        own = int(ffi.cast("uintptr_t", self._buffers))
        device.supports_buft = self._function(
            "bool(void *, void *)", lambda _, kind: int(ffi.cast("uintptr_t", kind)) == own
        )
        device.offload_op = self._function("bool(void *, const struct ggml_tensor *)", self._wants)
        registry = self._keep(ffi.new("struct reg *"))
        registry.api_version = 2
        registry.get_name = self._named("Accelerator")
        registry.get_device_count = self._function("size_t(void *)", lambda _: 1)
        registry.get_device = self._function("void *(void *, size_t)", lambda *_: self._device)
        device.reg = registry


_registered: dict[str, Accelerator] = {}  # the engine may call them until the process ends


def register(native: Native, name: str) -> None:
    """Show the engine this stand-in among its devices, once. Only for processes that compute nothing."""
    if name in _registered:
        return
    import cffi

    accelerator = _registered[name] = Accelerator(find_library(native.folder, "ggml-base"), cuda=name == STAND_IN_CUDA)
    ffi = cffi.FFI()
    ffi.cdef("void ggml_backend_device_register(void * device);")
    ffi.dlopen(str(find_library(native.folder, "ggml"))).ggml_backend_device_register(
        ffi.cast("void *", accelerator.handle)
    )
