"""Release the memory of weights and KV cache while the engine sleeps, and restore it at the same addresses.

SleepingMemory executes the tasks "sleep" and "wake_up" of a worker. It has two MemoryRegions, one for the weights and
one for the KV cache, and each region has its tensors in blocks. On a GPU a block is a range of virtual addresses,
reserved once, to which CUDA's virtual memory management maps physical memory; CUDA graphs that read the block stay
valid. On a CPU a block is an anonymous mapping.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from tok_core.errors import EngineError
from tok_core.messages import MemoryTask, TaskResult
from tok_core.runtime import HEARTBEAT, available_memory

GRANULE = 2 << 20  # bytes: page of the GPUs' virtual memory. Smaller tensors share blocks
ALIGNMENT = 512  # bytes, as that of PyTorch's allocator for CUDA


class SleepingMemory:
    """Weights and KV cache of a worker that may sleep.

    The tag "kv_cache" of a task includes the memory that PyTorch's allocator keeps for activations. CUDA graphs,
    communicators and per-slot tables keep their memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.weights = MemoryRegion(device)
        self.kv_cache = MemoryRegion(device)
        self._device = device
        self._activation_bytes = 0  # released from PyTorch's allocator

    def execute(self, task: MemoryTask, suspend_graphs: Callable[[bool], None]) -> TaskResult:
        """Release or restore memory while no step is in flight.

        `suspend_graphs(released)` is called afterwards: an idle worker must capture no CUDA graph while weights or KV
        cache have no memory. After an error, some of the task's tags may have been released or restored; the engine
        then undoes the operation on all workers.
        """
        try:
            with HEARTBEAT.coarse():  # page-locking host memory takes seconds
                try:
                    if task.action == "sleep":
                        self._release(task)
                    else:
                        self._restore(task)
                finally:
                    suspend_graphs(self.weights.released or self.kv_cache.released)
        except (EngineError, torch.OutOfMemoryError) as error:
            return TaskResult(f"{task.action}: {error}")
        return TaskResult()

    def _release(self, task: MemoryTask) -> None:
        if "weights" in task.tags:
            self.weights.release(keep=task.keep)
        if "kv_cache" in task.tags and not self.kv_cache.released:
            self.kv_cache.release(keep=False)
            self._activation_bytes = self._empty_allocator_cache()

    def _restore(self, task: MemoryTask) -> None:
        self._empty_allocator_cache()
        if "weights" in task.tags:
            self.weights.restore()
        if "kv_cache" in task.tags and self.kv_cache.released:
            self.kv_cache.restore()
            if self._activation_bytes:  # allocate one block and free it, as the warm-up does
                torch.empty(self._activation_bytes, dtype=torch.uint8, device=self._device)

    def _empty_allocator_cache(self) -> int:
        """Release the unused memory of PyTorch's allocator to the driver, and return its bytes."""
        if self._device.type != "cuda":
            return 0
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self._device)


class Block(Protocol):
    """Range of addresses whose memory can be released and restored.

    bytes  uint8; its contents are zero when new and when restored
    """

    bytes: Tensor

    def release(self) -> None:
        """Release the memory to the system. Nothing may access the block until `restore`."""

    def restore(self) -> None:
        """Allocate memory again. Raise EngineError if none is left; the block then stays released."""


class MemoryRegion:
    """Tensors of one device whose memory is released and restored together.

    size      bytes of all blocks
    released  whether the region has no memory now
    """

    def __init__(self, device: torch.device) -> None:
        self.size = 0
        self._device = device
        self._blocks: list[Block] = []
        self._shared = torch.empty(0, dtype=torch.uint8)  # unused end of the last block that small tensors share
        self._host_copy: HostMemory | None = None
        self._copied = False  # whether the host copy has the contents of the released region
        self.released = False

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros. It must not be used while the region is released."""
        count = math.prod(shape) * dtype.itemsize
        if count >= GRANULE:
            block = self._add_block(count)
        else:
            if count > len(self._shared):
                self._shared = self._add_block(GRANULE)
            block, self._shared = self._shared, self._shared[-(-count // ALIGNMENT) * ALIGNMENT :]
        return block[:count].view(dtype).view(shape)

    def _add_block(self, count: int) -> Tensor:
        block = DeviceBlock(count, self._device) if self._device.type == "cuda" else HostBlock(count)
        self._blocks.append(block)
        self.size += len(block.bytes)
        return block.bytes

    def release(self, *, keep: bool) -> None:
        """Release the memory to the system. Nothing on the device may use it until `restore`.

        keep  True: copy the contents to host memory first; on a CPU, release nothing. False: drop the contents, and
              the copy of a region that is released already

        Raises EngineError if there is no host memory for the copy. That host memory is kept for the next release.
        """
        if self.released or (keep and self._device.type == "cpu"):
            self._copied = self._copied and keep
            return
        if keep:
            if self._host_copy is None or len(self._host_copy.bytes) != self.size:
                self._host_copy = None  # frees its memory before the next line allocates
                self._host_copy = HostMemory(self.size)
            for block, copy in self._blocks_with_copies():
                copy.copy_(block.bytes, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for block in self._blocks:
            block.release()
        self.released, self._copied = True, keep

    def restore(self) -> None:
        """Allocate the memory of a released region again, with the contents copied by `release`, else with zeros.

        Raises EngineError if no memory is left; the whole region then stays released.
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
        if self._copied:
            for block, copy in self._blocks_with_copies():
                block.bytes.copy_(copy, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.released = False

    def _blocks_with_copies(self) -> list[tuple[Block, Tensor]]:
        """Return each block with its slice of the host copy."""
        assert self._host_copy is not None
        copies = torch.split(self._host_copy.bytes, [len(block.bytes) for block in self._blocks])
        return list(zip(self._blocks, copies, strict=True))


class HostBlock:
    """Block of a CPU. `restore` has nothing to do: the operating system provides zero pages when they are written."""

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
        self.bytes = torch.as_tensor(mapping, device=device)  # keeps the mapping alive


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
        # The tensors on these addresses keep this object alive, so that the addresses are freed with the last of them.
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
        """Release the memory to the driver."""
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
