"""The few UCP calls that ucxx's Python layer lacks, by ctypes on the same libucp.

ucxx makes the context and the worker; their handles are used here for tagged
messages with gather lists, for receiving frames of unknown length, for
registering the pool, and for the endpoints: ucxx 0.52 answers `close` of an
endpoint that has already failed with an empty request, and looking at that
crashes the process.
Constants and layouts are those of UCX 1.2x's ucp.h, which are stable there:
fields are only ever added behind a mask.
"""

from __future__ import annotations

import contextlib
import ctypes as C  # noqa: N812 - structures read better so
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_transfer.transport import Region
from protos.errors import ConfigError, InternalError

IN_PROGRESS = 1
CANCELED = -16

_ATTR_DATATYPE = 1 << 3
_ATTR_FLAGS = 1 << 4
_ATTR_NO_IMMEDIATE = 1 << 16
_CLOSE_FORCE = 1
_ENDPOINT_ADDRESS_MODE_AND_CALLBACK = 1 | 2 | 4
_ERROR_MODE_PEER = 1
_DATATYPE_IOV = 2
_MEM_MAP_ADDRESS_AND_LENGTH = 3
_EP_ATTR_TRANSPORTS = 1 << 3
_WIRES_MAX = 16
_IMPORT_LOCK = threading.Lock()


class Iov(C.Structure):
    _fields_ = [("buffer", C.c_void_p), ("length", C.c_size_t)]


ErrorCallback = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_int8)
"""Called from inside the worker's progress with (the peer's number, endpoint, status)."""


class _EndpointParam(C.Structure):
    _fields_ = [
        ("field_mask", C.c_uint64),
        ("address", C.c_void_p),
        ("error_mode", C.c_int),
        ("error_callback", ErrorCallback),
        ("error_argument", C.c_void_p),
        ("rest", C.c_char * 256),
    ]


class _RequestParam(C.Structure):
    _fields_ = [
        ("op_attr_mask", C.c_uint32),
        ("flags", C.c_uint32),
        ("request", C.c_void_p),
        ("callback", C.c_void_p),
        ("datatype", C.c_uint64),
        ("rest", C.c_char * 128),
    ]


class _TagInfo(C.Structure):
    _fields_ = [("sender_tag", C.c_uint64), ("length", C.c_size_t)]


class _MemMapParam(C.Structure):
    _fields_ = [
        ("field_mask", C.c_uint64),
        ("address", C.c_void_p),
        ("length", C.c_size_t),
        ("rest", C.c_char * 96),
    ]


class _Wire(C.Structure):
    _fields_ = [("transport", C.c_char_p), ("device", C.c_char_p)]


class _EndpointAttributes(C.Structure):
    _fields_ = [
        ("field_mask", C.c_uint64),
        ("name", C.c_char * 32),
        ("local_address", C.c_char * 128),
        ("remote_address", C.c_char * 128),
        ("wires", C.POINTER(_Wire)),
        ("num_wires", C.c_uint),
        ("wire_bytes", C.c_size_t),
        ("user_data", C.c_void_p),
    ]


def import_ucxx() -> Any:
    """ucxx's low-level module. The environment is left as it was.

    The import writes UCX_* variables that every child process would inherit,
    and UCX reads its log level from the environment alone.
    """
    with _IMPORT_LOCK:
        before = dict(os.environ)
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        try:
            import ucxx._lib.libucxx as module
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"UCX cannot be loaded: {error}; install ucxx-cu12, and load no MPI before it",
                field="transfer.transport",
                value="ucx",
                limit="ucxx-cu12 0.52",
            ) from error
        finally:
            for key in [key for key in os.environ if key not in before]:
                del os.environ[key]
            os.environ.update(before)
        return module


@contextlib.contextmanager
def without_environment(config: Mapping[str, str]) -> Iterator[None]:
    """Hide UCX_* variables of these settings: for interfaces UCX prefers them to its dict."""
    with _IMPORT_LOCK:
        hidden = {name: os.environ.pop(name, None) for name in (f"UCX_{key}" for key in config)}
        try:
            yield
        finally:
            os.environ.update({name: value for name, value in hidden.items() if value is not None})


class Ucp:
    """libucp's functions with their types. Make one after `import_ucxx`."""

    def __init__(self) -> None:
        import libucx

        folder = Path(libucx.__file__).parent / "lib"
        lib = C.CDLL(str(folder / "libucp.so"))
        pointer, size, u64 = C.c_void_p, C.c_size_t, C.c_uint64
        param = C.POINTER(_RequestParam)
        self._send = _typed(lib.ucp_tag_send_nbx, pointer, pointer, pointer, size, u64, param)
        self._receive = _typed(
            lib.ucp_tag_recv_nbx, pointer, pointer, pointer, size, u64, u64, param
        )
        info = C.POINTER(_TagInfo)
        self._probe = _typed(lib.ucp_tag_probe_nb, pointer, pointer, u64, u64, C.c_int, info)
        self._receive_probed = _typed(
            lib.ucp_tag_msg_recv_nbx, pointer, pointer, pointer, size, pointer, param
        )
        self._check = _typed(lib.ucp_request_check_status, C.c_int8, pointer)
        self._test = _typed(lib.ucp_tag_recv_request_test, C.c_int8, pointer, info)
        self.free = _typed(lib.ucp_request_free, None, pointer)
        self._cancel = _typed(lib.ucp_request_cancel, None, pointer, pointer)
        self._map = _typed(lib.ucp_mem_map, C.c_int8, pointer, C.POINTER(_MemMapParam), pointer)
        self._unmap = _typed(lib.ucp_mem_unmap, C.c_int8, pointer, pointer)
        self._query = _typed(lib.ucp_ep_query, C.c_int8, pointer, C.POINTER(_EndpointAttributes))
        self._create = _typed(
            lib.ucp_ep_create, C.c_int8, pointer, C.POINTER(_EndpointParam), pointer
        )
        self._close = _typed(lib.ucp_ep_close_nbx, pointer, pointer, param)
        self._force = _RequestParam(op_attr_mask=_ATTR_FLAGS, flags=_CLOSE_FORCE)
        ucs = C.CDLL(str(folder / "libucs.so"))
        self._status_text = _typed(ucs.ucs_status_string, C.c_char_p, C.c_int8)
        self._plain = _RequestParam(op_attr_mask=_ATTR_NO_IMMEDIATE)
        self._gather = _RequestParam(
            op_attr_mask=_ATTR_NO_IMMEDIATE | _ATTR_DATATYPE, datatype=_DATATYPE_IOV
        )
        self._info = _TagInfo()

    def open_endpoint(self, worker: int, address: bytes, callback: Any, number: int) -> int:
        """An endpoint's handle, or a negative status. Keep `callback` alive."""
        buffer = (C.c_char * len(address)).from_buffer_copy(address)
        param = _EndpointParam(
            field_mask=_ENDPOINT_ADDRESS_MODE_AND_CALLBACK,
            address=C.addressof(buffer),
            error_mode=_ERROR_MODE_PEER,
            error_callback=callback,
            error_argument=number,
        )
        handle = C.c_void_p()
        status = int(self._create(worker, C.byref(param), C.byref(handle)))
        return status if status != 0 or handle.value is None else handle.value

    def close_endpoint(self, endpoint: int) -> int:
        """A request that ends when the endpoint has, or 0 or less where it ended at once."""
        pointer = self._close(endpoint, C.byref(self._force))
        return 0 if pointer is None else _request(pointer)

    def send_bytes(self, endpoint: int, tag: int, data: C.Array[C.c_char]) -> int:
        """A request, or a negative status. Keep `data` alive until the request ended."""
        return _request(
            self._send(endpoint, C.addressof(data), len(data), tag, C.byref(self._plain))
        )

    def send_regions(self, endpoint: int, tag: int, regions: C.Array[Iov]) -> int:
        return _request(
            self._send(endpoint, C.addressof(regions), len(regions), tag, C.byref(self._gather))
        )

    def receive_regions(self, worker: int, tag: int, regions: C.Array[Iov]) -> int:
        whole = (1 << 64) - 1
        address, count = C.addressof(regions), len(regions)
        return _request(self._receive(worker, address, count, tag, whole, C.byref(self._gather)))

    def probe(self, worker: int, tag: int, mask: int) -> tuple[int, int, int] | None:
        """(message, its tag, its length) of one waiting message, taken off the queue."""
        message = self._probe(worker, tag, mask, 1, C.byref(self._info))
        if not message:
            return None
        return message, self._info.sender_tag, self._info.length

    def receive_probed(self, worker: int, message: int, buffer: C.Array[C.c_char]) -> int:
        """Into a buffer that is too short it ends by an error, the message being consumed."""
        address, count = C.addressof(buffer), len(buffer)
        return _request(self._receive_probed(worker, address, count, message, C.byref(self._plain)))

    def status(self, request: int) -> int:
        """IN_PROGRESS, 0 or a negative status."""
        return int(self._check(request))

    def received(self, request: int) -> tuple[int, int]:
        """(status, length in bytes) of a receive."""
        status = int(self._test(request, C.byref(self._info)))
        return status, self._info.length

    def cancel(self, worker: int, request: int) -> None:
        self._cancel(worker, request)

    def register(self, context: int, address: int, num_bytes: int) -> int:
        """A memory handle. Raises ConfigError where the memory cannot be registered."""
        param = _MemMapParam(
            field_mask=_MEM_MAP_ADDRESS_AND_LENGTH, address=address, length=num_bytes
        )
        handle = C.c_void_p()
        status = int(self._map(context, C.byref(param), C.byref(handle)))
        if status != 0 or handle.value is None:
            raise ConfigError(f"UCX cannot register {num_bytes} bytes: {self.text(status)}")
        return handle.value

    def unregister(self, context: int, handle: int) -> None:
        self._unmap(context, handle)

    def wires(self, endpoint: int) -> list[str]:
        """Names of the transports that an endpoint uses now, e.g. ["posix", "cma"]."""
        entries = (_Wire * _WIRES_MAX)()
        attributes = _EndpointAttributes(
            field_mask=_EP_ATTR_TRANSPORTS,
            wires=entries,
            num_wires=_WIRES_MAX,
            wire_bytes=C.sizeof(_Wire),
        )
        if int(self._query(endpoint, C.byref(attributes))) != 0:
            return []
        return [entries[i].transport.decode() for i in range(attributes.num_wires)]

    def text(self, status: int) -> str:
        return str(self._status_text(status).decode())


def iov_array(regions: Sequence[Region]) -> C.Array[Iov]:
    return (Iov * len(regions))(*[Iov(address, length) for address, length in regions])


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype = result
    function.argtypes = arguments
    return function


def _request(pointer: int | None) -> int:
    """A started request, or a negative status: UCS_STATUS_PTR carries both."""
    if pointer is None:
        raise InternalError("UCX completed a request at once though told not to")
    if pointer >= (1 << 64) - 128:
        return pointer - (1 << 64)
    return pointer
