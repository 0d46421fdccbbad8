"""MemoryRegion: tensors whose memory is given back to the system, and taken again at the same addresses.

On a GPU a block is a range of virtual addresses, reserved once, to which CUDA's virtual memory management maps physical
memory; so CUDA graphs that read the block stay valid. On a CPU a block is an anonymous mapping.
"""

from __future__ import annotations

import math
import mmap
import weakref
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from tok_core.errors import EngineError
from tok_core.runtime import available_memory

GRANULE = 2 << 20  # bytes: page of the GPUs' virtual memory. Smaller tensors share blocks
ALIGNMENT = 512  # bytes, as that of PyTorch's allocator for CUDA


class Block(Protocol):
    """Addresses whose memory can be given back. `bytes` is uint8; its memory is zero when new and when restored."""

    bytes: Tensor

    def release(self) -> None:
        """Give the memory back to the system. Nobody may access it until `restore`."""

    def restore(self) -> None:
        """Take memory again. Raise EngineError if none is left; the block is then as before."""


class MemoryRegion:
    """Tensors of one device whose memory is released and restored together; it is zero when new.

    size      bytes of all blocks
    released  whether the memory is given back
    """

    def __init__(self, device: torch.device) -> None:
        self.size = 0
        self._device = device
        self._blocks: list[Block] = []
        self._rest = torch.empty(0, dtype=torch.uint8)  # unused end of the last shared block
        self._copy: HostMemory | None = None
        self._kept = False
        self.released = False

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor. It must not be used while the region is released."""
        count = math.prod(shape) * dtype.itemsize
        if count >= GRANULE:
            block = self._add_block(count)
        else:
            if count > len(self._rest):
                self._rest = self._add_block(GRANULE)
            block, self._rest = self._rest, self._rest[-(-count // ALIGNMENT) * ALIGNMENT :]
        return block[:count].view(dtype).view(shape)

    def _add_block(self, count: int) -> Tensor:
        block = DeviceBlock(count, self._device) if self._device.type == "cuda" else HostBlock(count)
        self._blocks.append(block)
        self.size += len(block.bytes)
        return block.bytes

    def release(self, *, keep: bool) -> None:
        """Give the memory back to the system. Nothing on the device may use it until `restore`.

        keep  True: copy the contents to host memory first; on a CPU nothing is released. False: drop the contents, and
              the copy of a region that is released already

        Raises EngineError if there is no host memory for the copy. That memory stays reserved for the next time.
        """
        if self.released or (keep and self._device.type == "cpu"):
            self._kept = self._kept and keep
            return
        if keep:
            if self._copy is None or len(self._copy.bytes) != self.size:
                self._copy = None
                self._copy = HostMemory(self.size)
            for block, part in self._with_copies():
                part.copy_(block.bytes, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for block in self._blocks:
            block.release()
        self.released, self._kept = True, keep

    def restore(self) -> None:
        """Allocate the memory again, with the contents that were kept, else zeros. No effect unless it was released.

        Raises EngineError if no memory is left, with nothing changed.
        """
        if not self.released:
            return
        restored: list[Block] = []
        try:
            for block in self._blocks:
                block.restore()
                restored.append(block)
        except EngineError:
            for block in restored:
                block.release()
            raise
        if self._kept:
            for block, part in self._with_copies():
                block.bytes.copy_(part, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.released = False

    def _with_copies(self) -> list[tuple[Block, Tensor]]:
        """Return each block with its part of the copy in the host's memory."""
        assert self._copy is not None
        parts = torch.split(self._copy.bytes, [len(block.bytes) for block in self._blocks])
        return list(zip(self._blocks, parts, strict=True))


class HostBlock:
    """Block of a CPU. Restoring it costs nothing: the kernel provides zero pages when they are written."""

    def __init__(self, count: int) -> None:
        self._memory = anonymous_memory(count)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def release(self) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        pass


class DeviceBlock:
    """Block of a GPU, freed with the last tensor that uses it."""

    def __init__(self, count: int, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        mapping = _Mapping(count, device)
        self.restore, self.release = mapping.map, mapping.unmap
        mapping.map()
        self.bytes = torch.as_tensor(mapping, device=device)  # refers to the mapping


class _Mapping:
    """Reserved addresses of a GPU, and the physical memory mapped there, if any."""

    def __init__(self, count: int, device: torch.device) -> None:
        from cuda.bindings import driver  # PyTorch for CUDA depends on it

        self._driver, self._device = driver, device
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = torch.cuda.current_device() if device.index is None else device.index
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granule = self._call("cuMemGetAllocationGranularity", self._properties, recommended)
        self._size = -(-count // granule) * granule
        self._address = int(self._call("cuMemAddressReserve", self._size, 0, 0, 0))
        self._handles: list[Any] = []
        # The tensors that use this object refer to it.
        weakref.finalize(self, _free, driver, device, self._address, self._size, self._handles).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def map(self) -> None:
        """Map new memory, filled with zeros. Raise EngineError if none is left."""
        driver = self._driver
        handle = self._call("cuMemCreate", self._size, self._properties, 0)
        try:
            self._call("cuMemMap", self._address, self._size, 0, handle, 0)
        except EngineError:
            self._call("cuMemRelease", handle)
            raise
        self._handles.append(handle)
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            self._call("cuMemSetAccess", self._address, self._size, [access], 1)
        except EngineError:
            self.unmap()
            raise
        torch.as_tensor(self, device=self._device).zero_()

    def unmap(self) -> None:
        """Give the memory back to the driver."""
        self._call("cuMemUnmap", self._address, self._size)
        self._call("cuMemRelease", self._handles.pop())

    def _call(self, name: str, *arguments: object) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise EngineError(f"{self._device} refuses {self._size / 2**20:,.0f} MiB: {name} failed with {status.name}")
        return results[0] if results else None


def _free(driver: Any, device: torch.device, address: int, size: int, handles: list[Any]) -> None:
    """Free memory and addresses once nothing on the device uses them."""
    torch.cuda.synchronize(device)
    for handle in handles:
        driver.cuMemUnmap(address, size)
        driver.cuMemRelease(handle)
    driver.cuMemAddressFree(address, size)


class HostMemory:
    """Page-locked host memory, `bytes`, for direct copies to and from a GPU.

    `torch.empty(…, pin_memory=True)` would round the size up to a power of two, and fill its pages in one thread.
    """

    def __init__(self, count: int) -> None:
        if count > (free := available_memory()):
            raise EngineError(
                f"a copy takes {count / 2**30:.1f} GiB of host memory, of which {free / 2**30:.1f} are free"
            )
        memory = anonymous_memory(count)
        with suppress(OSError):  # a kernel without huge pages does not know the advice
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.bytes.fill_(0)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(self.bytes.data_ptr(), count, 0))
        except RuntimeError as error:
            raise EngineError(f"{count / 2**30:.1f} GiB of host memory cannot be locked: {error}") from error
        weakref.finalize(self, runtime.cudaHostUnregister, self.bytes.data_ptr()).atexit = False


def anonymous_memory(count: int) -> mmap.mmap:
    """Return `count` bytes of private memory. Raise EngineError if the system refuses them."""
    try:
        return mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise EngineError(f"the system refuses {count / 2**30:.1f} GiB of memory: {error}") from error
