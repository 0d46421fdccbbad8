"""Share tensors between processes on one GPU by CUDA IPC: `export_tensors` for trainers, `mapped` for workers."""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

HANDLE_BYTES = 64  # size of CUipcMemHandle
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def export_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, object]:
    """Return the `update_info` of `POST /update_weights` for contiguous tensors on a GPU.

    The tensors must keep their memory and values until the request is answered. Raises RuntimeError for memory that
    CUDA cannot share, such as torch's expandable segments.
    """
    names, dtypes, shapes, handles = [], [], [], []
    devices = set()
    for name, tensor in named_tensors:
        if not tensor.is_cuda or not tensor.is_contiguous():
            raise ValueError(f"tensor {name} is {tensor.device}; allowed: a contiguous tensor on a GPU")
        devices.add(tensor.device)
        handle, base = _Handle(), ctypes.c_uint64()
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), None, ctypes.c_uint64(tensor.data_ptr()))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(tensor.data_ptr()))
        text = base64.b64encode(bytes(handle.reserved)).decode()
        names.append(name)
        dtypes.append(str(tensor.dtype).removeprefix("torch."))
        shapes.append(list(tensor.shape))
        handles.append({gpu_uuid(tensor.device): {"handle": text, "offset": tensor.data_ptr() - base.value}})
    for device in devices:
        torch.cuda.synchronize(device)
    return {"names": names, "dtype_names": dtypes, "shapes": shapes, "ipc_handles": handles}


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def mapped(device: torch.device) -> Iterator[Callable[[bytes, int, int], Tensor]]:
    """Yield a function that maps `size` bytes at `offset` of another process's allocation, as a uint8 tensor.

    The tensors are valid until the context ends. Raises RuntimeError for handles that cannot be opened, and for bytes
    outside of their allocation.
    """
    opened: dict[bytes, tuple[int, int]] = {}
    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).synchronize()  # creates the context

    def open_bytes(handle: bytes, offset: int, size: int) -> Tensor:
        if len(handle) != HANDLE_BYTES:
            raise RuntimeError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        if handle not in opened:
            start, extent = ctypes.c_uint64(), ctypes.c_size_t()
            structure = _Handle.from_buffer_copy(handle)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(start), structure, ctypes.c_uint(LAZY_PEER_ACCESS))
            opened[handle] = start.value, 0
            _call("cuMemGetAddressRange_v2", None, ctypes.byref(extent), start)
            opened[handle] = start.value, extent.value
        base, length = opened[handle]
        if offset < 0 or offset + size > length:
            raise RuntimeError(f"bytes {offset} to {offset + size} are outside of an allocation of {length}")
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=device)
        return torch.as_tensor(_Bytes(base + offset, size), device=device)

    try:
        yield open_bytes
    finally:
        torch.cuda.synchronize(device)
        for base, _ in opened.values():
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


class _Bytes:
    """Bytes at an address of the GPU, for `torch.as_tensor`."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _call(name: str, *arguments: object) -> None:
    """Call a function of CUDA's driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode()} ({code})")
