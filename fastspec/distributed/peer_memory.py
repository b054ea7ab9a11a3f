"""GPU memory that the processes of a host share, by CUDA IPC handles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that the driver knows


class IpcMemoryHandle(ctypes.Structure):
    """CUipcMemHandle of the CUDA driver: lets another process open device memory."""

    _fields_ = [("reserved", ctypes.c_byte * 64)]


class SharedMemory:
    """GPU memory that this process shares with other processes, and the addresses of the memory that they share.

    The driver allocates it, because torch's allocator may return memory without an IPC handle (expandable segments).
    torch's own symmetric memory takes seconds to create.

    Args:
        size: number of bytes that each process shares.
        word: 4-byte value with which this process's memory is filled.
        everyone: function that gathers bytes from all processes, in rank order.
        rank: rank of this process.
        driver: the CUDA driver's library. None: libcuda is loaded.

    Attributes:
        addresses: for each rank, the address of its memory in this process.

    Raises:
        RuntimeError: the driver reported an error; the message has its reason. Everything allocated before is freed.
    """

    def __init__(
        self, size: int, word: int, everyone: Callable[[bytes], Sequence[bytes]], rank: int, driver: Any = None
    ) -> None:
        self._own, self._context = ctypes.c_uint64(), ctypes.c_void_p()
        self._opened: list[ctypes.c_uint64] = []
        self._driver = driver or ctypes.CDLL("libcuda.so.1")
        try:
            handle, refused = self._make(size, word), b""
        except RuntimeError as error:
            handle, refused = IpcMemoryHandle(), str(error).encode()
        told = everyone(bytes(handle) + refused)  # every rank takes part, also one that was refused
        whose = next((index for index, each in enumerate(told) if each[64:]), None)
        try:
            if whose is not None:
                raise RuntimeError(f"rank {whose}: {told[whose][64:].decode()}")
            self.addresses = [self._own.value if other == rank else self._open(each) for other, each in enumerate(told)]
        except RuntimeError:
            self.close()
            raise

    def _make(self, size: int, word: int) -> IpcMemoryHandle:
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(size))
        self._call("cuMemsetD32_v2", self._own, ctypes.c_uint32(word % 2**32), ctypes.c_size_t(size // 4))
        handle = IpcMemoryHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        return handle

    def _open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        given = IpcMemoryHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(LAZY_PEER_ACCESS))
        self._opened.append(address)
        return address.value

    def close(self) -> None:
        """Closes the memory of other ranks and frees this process's memory. No kernel may still use either."""
        opened, self._opened = self._opened, []
        own, self._own = self._own, ctypes.c_uint64()
        if not own.value:
            return
        # the caller may be any thread, for example one in which garbage is collected
        self._driver.cuCtxPushCurrent_v2(self._context)
        for address in opened:
            self._driver.cuIpcCloseMemHandle(address)
        self._driver.cuMemFree_v2(own)
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def __del__(self) -> None:
        self.close()

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            reason = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(reason))
            raise RuntimeError(f"{name}: {(reason.value or b'unknown error').decode()} ({code})")
