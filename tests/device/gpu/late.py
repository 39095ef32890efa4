"""A device that is late on purpose. Its tensors say ``late:0``, their bytes lie in host memory, and
what is asked of them is done afterwards, on another thread, in any order that its streams and their
events allow: drawn from a seed, the same again with the same seed.

What is not ordered on purpose goes wrong here, where a real device is usually fast enough to hide
it: a kernel reads what has not been copied yet, a copy reads pinned memory that has been filled
anew, memory that was given back is scribbled over as soon as its stream allows. What makes the host
wait is counted by name (`LateDevice.waits`), and so are copies of pageable memory.

Shapes are computed by torch's meta device. Views are made at once, everything else is queued.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from espnx import streams
from espnx.storage.gds.memory import EventFence, Fence
from tests.storage.gds.cufile_stub import HostArray

NAME = "late"
_SCRIBBLE = 0xA5
_aten = torch.ops.aten
#: What a CUDA device answers only after everything that is queued on the stream.
_ASKS = {
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
}


def _setup() -> torch.device:
    """torch's place for a device of somebody else's, once a process."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        # other tests of this process fork torch's random state, of every device it knows
        module = getattr(torch, NAME)
        module.get_rng_state = lambda device=None: torch.zeros(0, dtype=torch.uint8)
        module.set_rng_state = lambda state, device=None: None
        module.__name__ = NAME  # transformers asks an accelerator's module for it
    return torch.device(NAME, 0)


class LateStream:
    """See `espnx.streams.Stream`. `queue` holds work and points to wait for; `pace` is how often
    the stream gets its turn, beside others up to a thousand times as fast."""

    def __init__(self, late: LateDevice):
        self.late, self.device = late, late.device
        self.queue: deque[Callable[[], object] | LateEvent] = deque()
        self.queued = self.done = 0
        self.pace = 10.0 ** -late.draw(3)

    def record_event(self) -> LateEvent:
        return LateEvent(self, self.queued)

    def wait_event(self, event: LateEvent) -> None:
        self.late.enqueue(self, event)

    def wait_stream(self, stream: LateStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.late.until(self.record_event(), "synchronize")


class LateEvent:
    """See `espnx.streams.Event`: so much of a stream."""

    def __init__(self, stream: LateStream, position: int):
        self.stream, self.position = stream, position

    def has_passed(self) -> bool:
        return self.stream.done >= self.position

    def query(self) -> bool:
        self.stream.late.nudge()
        return self.has_passed()

    def synchronize(self) -> None:
        self.stream.late.until(self, "event")


class Block:
    """A piece of the device's memory, alive as long as a tensor over it; work that is queued does
    not keep it."""

    def __init__(self, owner: object = None):
        self.owner = owner
        self.users: set[LateStream] = set()


class LateTensor(torch.Tensor):
    """A tensor on the device: `inner` are its bytes."""

    is_cuda = True
    inner: torch.Tensor
    block: Block
    late: LateDevice
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, block: Block, late: LateDevice) -> Self:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=late.device,
        )

    def __init__(self, inner: torch.Tensor, block: Block, late: LateDevice):
        self.inner, self.block, self.late = inner, block, late

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LateTensor({list(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Any) -> None:
        self.block.users.add(stream)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found: list[LateTensor] = []
        tree_map(lambda x: found.append(x) if isinstance(x, LateTensor) else None, (args, kwargs))
        return found[0].late.dispatch(func, args, kwargs or {})


class LateDevice(TorchDispatchMode):
    """See `espnx.streams.Streams`. A context manager of the threads that make tensors on it.

    Args:
        seed: of the order in which streams go on.
        eagerness: how often something is done that nobody waits for.

    Attributes:
        waits: how often the host waited, by what for.
        pageable_copies: to the device, of memory that is not pinned.
    """

    def __init__(self, seed: int, eagerness: float = 0.1):
        super().__init__()
        self.device, self.eagerness = _setup(), eagerness
        self._random = random.Random(seed)
        self.waits: Counter[str] = Counter()
        self.pageable_copies = 0
        self._lock = threading.Condition()
        self._streams: list[LateStream] = []
        self._internal: list[LateStream] = []
        self._current = threading.local()
        self._pinned: list[torch.Tensor] = []
        self._is_asked = False
        self._wanted: LateEvent | None = None
        self._steps = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        self.main = self.new(self.device)
        self._thread = threading.Thread(target=self._run, daemon=True, name="late-device")
        self._thread.start()

    def enter_thread(self) -> None:
        """The calling thread can make tensors on the device, for as long as it lives."""
        _OtherThread(self).__enter__()

    def close(self) -> None:
        """Does what is left, and ends the thread."""
        for stream in [*self._streams, *self._internal]:
            self.until(stream.record_event(), "")
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._thread.join()

    # --- streams

    def is_available(self) -> bool:
        return True

    def current_index(self) -> int:
        return 0

    def current(self, device: torch.device) -> LateStream:
        return getattr(self._current, "stream", self.main)

    def new(self, device: torch.device) -> LateStream:
        with self._lock:
            self._streams.append(LateStream(self))
            return self._streams[-1]

    @contextmanager
    def _on(self, stream: LateStream) -> Iterator[None]:
        before, self._current.stream = self.current(self.device), stream
        try:
            yield
        finally:
            self._current.stream = before

    def on(self, stream: LateStream) -> AbstractContextManager[object]:
        return self._on(stream)

    def event_behind(self, stream: LateStream) -> LateEvent:
        return stream.record_event()

    def is_capturing(self, stream: LateStream) -> bool:
        return False

    def pinned(self, size_bytes: int) -> torch.Tensor:
        # kept: torch gives pinned memory to nobody else while a copy needs it
        self._pinned.append(torch.full((size_bytes,), _SCRIBBLE, dtype=torch.uint8))
        return self._pinned[-1]

    def free_bytes(self, device: torch.device) -> int:
        return 1 << 30

    # --- the queue

    def enqueue(self, stream: LateStream, item: Callable[[], object] | LateEvent) -> None:
        with self._lock:
            stream.queue.append(item)
            stream.queued += 1
        self.nudge()

    def draw(self, most: float) -> float:
        with self._lock:
            return self._random.uniform(0.0, most)

    def nudge(self) -> None:
        """Time passes: something may be done."""
        with self._lock:
            if self._random.random() < self.eagerness:
                self._demand(None, self._random.randrange(1, 8))

    def until(self, event: LateEvent, why: str) -> None:
        """The host waits."""
        with self._lock:
            if why:
                self.waits[why] += 1
            self._demand(event, 0)

    def _demand(self, event: LateEvent | None, steps: int) -> None:
        """Lets the thread work, and waits for it: nothing depends on who is faster. The lock is
        held."""
        if threading.current_thread() is self._thread:
            return
        while self._is_asked:  # by another thread
            self._lock.wait()
        self._is_asked, self._wanted, self._steps = True, event, steps
        self._lock.notify_all()
        while self._failure is None and (
            self._steps or (event is not None and not event.has_passed())
        ):
            self._lock.wait()
        self._is_asked, self._wanted, self._steps = False, None, 0
        self._lock.notify_all()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        with self._lock:
            while not self._is_closed:
                if not self._steps and (self._wanted is None or self._wanted.has_passed()):
                    self._lock.wait()
                    continue
                stream = self._next()
                if stream is None:
                    self._steps = 0
                    if self._wanted is not None and not self._wanted.has_passed():
                        self._failure = RuntimeError("streams wait for one another")
                    self._lock.notify_all()
                    continue
                item = stream.queue.popleft()
                try:
                    if not isinstance(item, LateEvent):
                        with torch.no_grad():
                            item()
                except BaseException as error:  # told to whoever waits
                    self._failure = error
                del item
                stream.done += 1
                self._steps = max(self._steps - 1, 0)
                self._lock.notify_all()

    def _next(self) -> LateStream | None:
        """A stream whose first item can be done."""
        self._internal = [stream for stream in self._internal if stream.queue]
        able = [
            stream
            for stream in [*self._streams, *self._internal]
            if stream.queue
            and (not isinstance(head := stream.queue[0], LateEvent) or head.has_passed())
        ]
        return self._random.choices(able, [each.pace for each in able])[0] if able else None

    # --- tensors

    def wrap(self, inner: torch.Tensor, owner: object = None) -> LateTensor:
        """A tensor over host memory, which keeps `owner`."""
        return LateTensor(inner, Block(owner), self)

    def _allocate(self, shape: Iterable[int], stride: Iterable[int], dtype: Any) -> LateTensor:
        """Memory of the current stream: when it is given back, whatever comes next in that stream
        may write to it, and in the streams that it is recorded for."""
        inner = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
        storage = inner.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        whole.fill_(_SCRIBBLE)
        found = self.wrap(inner)
        weakref.finalize(
            found.block, self._given_back, whole, self.current(self.device), found.block.users
        ).atexit = False
        return found

    def _given_back(self, whole: torch.Tensor, stream: LateStream, users: set[LateStream]) -> None:
        last = LateStream(self)
        points = [each.record_event() for each in {stream, *users}]
        last.queue.extend([*points, lambda: whole.fill_(_SCRIBBLE)])
        last.queued = len(last.queue)
        self._internal.append(last)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        mine = device is not None and torch.device(device).type == NAME
        if mine or any(isinstance(x, LateTensor) for x in _tensors((args, kwargs))):
            return self.dispatch(func, args, kwargs)
        return func(*args, **kwargs)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C._DisableTorchDispatch():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (_aten._to_copy.default, _aten.copy_.default):
            return self._copy(func, args, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _PLACES}
        returned = [each.alias_info for each in func._schema.returns]
        if func in _ASKS or _has_mask(func, args):
            self.until(self.current(self.device).record_event(), func._overloadpacket.__name__)
            return self._wrapped(func(*_inner(args), **_inner(kwargs)))
        if returned and returned[0] is not None:
            if not returned[0].is_write:  # a view
                base = next(x for x in _tensors((args, kwargs)) if isinstance(x, LateTensor))
                return tree_map(
                    lambda x: LateTensor(x, base.block, self) if isinstance(x, torch.Tensor) else x,
                    func(*_inner(args), **_inner(kwargs)),
                )
            self._launch(func, args, kwargs, None)
            return args[0]
        out = tree_map(
            lambda x: (
                self._allocate(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
            ),
            self._shapes(func, args, kwargs),
        )
        if func is not _aten.empty.memory_format:
            self._launch(func, args, kwargs, out)
        return out

    def _shapes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace != "aten" and not func._opname.endswith("_inside"):
            # ours, which are right whatever the bytes are; but for those that trust their tables
            return func(*_inner(args), **_inner(kwargs))
        if not list(_tensors((args, kwargs))):
            kwargs = {**kwargs, "device": "meta"}
        return func(*_meta(args), **_meta(kwargs))

    def _launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        args, kwargs = tree_map(self._there, (args, kwargs))
        targets, is_whole = list(_tensors(_inner(out))), func not in _MEANING

        def run() -> None:
            made = (_MEANING.get(func) or func)(*args, **kwargs)
            # of a kernel that we know by its meaning, what anybody asks for
            for target, each in zip(targets, _tensors(made) if targets else (), strict=is_whole):
                target.copy_(each)

        self.enqueue(self.current(self.device), run)

    def _there(self, value: Any) -> Any:
        """A tensor as a kernel gets it. One of the host that is pinned is looked at when the copy
        is made."""
        if isinstance(value, LateTensor):
            return value.inner
        if not isinstance(value, torch.Tensor) or self._is_pinned(value):
            return value
        self.pageable_copies += value.dim() > 0
        return value.clone()

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        place = tensor.data_ptr()
        return any(
            each.data_ptr() <= place < each.data_ptr() + max(each.numel(), 1)
            for each in self._pinned
        )

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_new, source = func is _aten._to_copy.default, args[-1] if len(args) == 1 else args[1]
        if is_new:
            device = torch.device(kwargs.get("device") or source.device)
            dtype = kwargs.get("dtype") or source.dtype
            made = torch.empty_like(source, dtype=dtype, device="meta")
            target: Any = (
                self._allocate(made.shape, made.stride(), dtype)
                if device.type == NAME
                else torch.empty_strided(made.shape, made.stride(), dtype=dtype)
            )
        else:
            target = args[0]
        patient = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        late_source, late_target = isinstance(source, LateTensor), isinstance(target, LateTensor)
        to, what = _inner(target), _inner(source)
        if late_target and not late_source and not self._is_pinned(source):
            self.pageable_copies += 1
            what = source.clone()  # staged before the call is over
        self.enqueue(self.current(self.device), lambda: to.copy_(what))
        if (
            late_source != late_target
            and (patient or (late_source and not is_new and not self._is_pinned(target)))
        ) or (late_source and not late_target and is_new):
            self.until(self.current(self.device).record_event(), "copy")
        return target

    def _wrapped(self, value: Any) -> Any:
        def wrap(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            found = self._allocate(x.shape, x.stride(), x.dtype)
            found.inner.copy_(x)
            return found

        return tree_map(wrap, value)


class _OtherThread(TorchDispatchMode):
    def __init__(self, late: LateDevice):
        super().__init__()
        self.late = late

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.late.__torch_dispatch__(func, types, args, kwargs)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, n_sums: int, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    n, rows = scores.shape[-2:]
    if is_causal:
        scores = scores.masked_fill(torch.ones(n, rows).triu(1).bool(), -torch.inf)
    sums = torch.full((*q.shape[:2], n_sums), torch.inf)
    sums[:, :, :n] = scores.logsumexp(dim=-1)
    return (scores.softmax(dim=-1) @ v.double()).to(q.dtype), sums


def _flash(
    q: Any,
    k: Any,
    v: Any,
    dropout: float = 0.0,
    is_causal: bool = False,
    debug: bool = False,
    *,
    scale: float,
) -> Any:
    assert (dropout, debug) == (0.0, False)
    return _attended(q, k, v, scale, q.shape[2], is_causal)


def _efficient(
    q: Any, k: Any, v: Any, bias: Any, sums: bool, dropout: float, is_causal: bool, *, scale: float
) -> Any:
    assert (bias, sums, dropout, is_causal) == (None, True, 0.0, True)
    return _attended(q, k, v, scale, -(-q.shape[2] // 32) * 32, is_causal)


#: Kernels that torch has for CUDA alone: what they give, of which shape their meta versions know.
_MEANING: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
}

_PLACES = ("device", "pin_memory", "layout")


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _inner(value: Any) -> Any:
    return tree_map(lambda x: x.inner if isinstance(x, LateTensor) else x, value)


def _meta(value: Any) -> Any:
    def on_meta(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta")

    return tree_map(on_meta, value)


def _has_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether what is found depends on how many entries of a mask are set."""
    return func is _aten.index.Tensor and any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )


class LateMemory:
    """`espnx.storage.gds.memory.DeviceMemory` of the device: what cuFile is to read into."""

    def __init__(self, late: LateDevice):
        self.late, self.device = late, late.device
        self.allocated: list[torch.Tensor] = []

    def enter_thread(self) -> None:
        return

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        self.allocated.append(torch.full((size_bytes,), _SCRIBBLE, dtype=torch.uint8))
        return self.late.wrap(self.allocated[-1])

    def wrap(self, owner: object, pointer: int, size_bytes: int) -> torch.Tensor:
        """Work that is queued looks at the arena: only tensors keep the owner."""
        for arena in self.allocated:
            begin = pointer - arena.data_ptr()
            if begin >= 0 and begin + size_bytes <= arena.numel():
                return self.late.wrap(arena[begin : begin + size_bytes], owner)
        raise AssertionError(f"{HostArray.__name__}: no arena has {size_bytes} bytes there")

    def settle(self) -> None:
        for stream in list(self.late._streams):
            self.late.until(stream.record_event(), "settle")

    def stream(self) -> LateStream:
        return self.late.current(self.device)

    def fence(self, some: Iterable[Any]) -> Fence:
        return EventFence({*some, self.stream()})


@contextmanager
def late_device(seed: int, eagerness: float = 0.1) -> Iterator[LateDevice]:
    """The device of the block; the calling thread can make tensors on it."""
    late = LateDevice(seed, eagerness)
    streams.register(NAME, late)
    try:
        with late:
            yield late
    finally:
        late.close()
        streams._OF_TYPE.pop(NAME)
