"""Everything sinklens knows of nnsight's inside; nothing else imports or touches it.

nnsight runs the body of a trace block in step with the model. The block *waits* at a *location*, a string such as
``"model.blocks.0.attn.hook_z.output"``; when the model reaches the location, nnsight *serves* it: it hands the value to
the block and goes on with what the block made of it. Each time that a location is reached is a *visit*, and a block
waits for a certain visit.

What the rest of sinklens needs of this is here under names of our own: `Root` is a model that blocks can be opened on,
`Handover` what passes between it and its blocks, `BlockTracer` a block that runs beside any function.

One way this fails: nothing below is promised by nnsight. tests/hooks/test_interleaving_contract.py tries each thing
that is relied on, and names the installed version of nnsight where one has changed.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, TracebackType
from typing import Any, NamedTuple

from torch import nn

from sinklens.errors import HookNameError, SinklensError, nearest


def _import_beartype_first() -> None:
    """Import beartype, where it is installed, while `object` has no attribute that cannot be hashed.

    nnsight puts a `save` on `object` that cannot be, and beartype hashes all that `object` has when it is imported; so
    ``import beartype`` fails in any process that imported nnsight before it. nnsight itself imports anyio first for a
    reason of the same kind. Where nnsight was imported before sinklens, `save` is taken away for that moment.
    """
    if "beartype" in sys.modules or importlib.util.find_spec("beartype") is None:
        return
    if "nnsight" not in sys.modules or "save" not in vars(object):
        importlib.import_module("beartype")
        return
    from nnsight import save
    from nnsight._c import mount, unmount

    unmount("save")
    try:
        importlib.import_module("beartype")
    finally:
        mount(save, "save")


_import_beartype_first()

from nnsight import NNsight  # noqa: E402
from nnsight.intervention.batching import Batcher  # noqa: E402
from nnsight.intervention.interleaver import Event, Interleaver, Mediator  # noqa: E402
from nnsight.intervention.source import STATE, Controller  # noqa: E402
from nnsight.intervention.tracer import InterleavingTracer  # noqa: E402
from nnsight.tracing.util import push  # noqa: E402


class Handover:
    """What passes between a model and the blocks that are open on it."""

    def __init__(self, interleaver: Interleaver, path: str) -> None:
        self._interleaver, self._path = interleaver, path
        self._at_start: dict[str, int] = {}

    @property
    def running(self) -> bool:
        """Whether a block is running beside the model now."""
        return self._interleaver.interleaving

    def wants(self, name: str) -> bool:
        """Whether a block waits for this visit of the point called `name`, or a cache keeps it."""
        interleaver = self._interleaver
        if not interleaver.interleaving or not interleaver.busy:
            return False
        return any(place in interleaver.observers for place in self._places(name)) or self.waits_at(name)

    def waits_at(self, name: str) -> bool:
        """Whether a block has stopped at this visit of the point called `name`."""
        if not self._interleaver.interleaving:
            return False
        places = self._places(name)
        return any(
            mediator.pending is not None
            and mediator.pending.provider in places
            and mediator.pending.iteration == mediator.occurrence(mediator.pending.provider)
            for mediator in self._interleaver.mediators
        )

    def serve(self, location: str, value: Any) -> None:
        """Reach `location` with `value`."""
        self._interleaver.handle(location, value)

    def release(self, location: str, value: Any) -> None:
        """Hand `value` to every block that waits at `location`, whichever visit it waits for, until none does."""
        while waiting := [
            mediator
            for mediator in self._interleaver.mediators
            if mediator.pending and mediator.pending.provider == location
        ]:
            for mediator in waiting:
                mediator.pending = mediator.switch(value)
        self._interleaver.reindex()  # they wait elsewhere now

    def count_visits(self, names: Iterable[str], visits: int) -> None:
        """Say how often the run has reached the points called `names`.

        A point that nobody watches is passed by without a visit, so nnsight could not count them.
        """
        counts = self._interleaver.counts
        if visits == 0:
            self._at_start = {place: counts.get(place, 0) for name in names for place in self._places(name)}
        for place, start in self._at_start.items():
            counts[place] = start + visits

    def refuse_late(self, visit: int | None, error: Callable[[str], Exception]) -> None:
        """Raise ``error(path)`` in each block that waits at a module or point for a visit that is over or never comes.

        Args:
            visit: the one that is over; a block that nnsight's own iteration makes wait for a later one may wait. None
                where the run is over: then those end by nnsight's own rules.
        """
        for mediator in self._interleaver.mediators:
            pending = mediator.pending
            if pending is None or pending.event is Event.BARRIER:
                continue
            if mediator.iteration and (visit is None or pending.iteration > visit):
                continue
            if pending.provider is not None and pending.provider.startswith(f"{self._path}."):
                place = pending.provider.removeprefix(f"{self._path}.").rpartition(".")[0]
                mediator.worker.throw(error(place))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Nothing that the model reaches is served; for a pass in the middle of another."""
        interleaving = self._interleaver.interleaving
        self._interleaver.interleaving = False
        try:
            yield
        finally:
            self._interleaver.interleaving = interleaving

    def _places(self, name: str) -> tuple[str, str, str]:
        """nnsight's locations at a point."""
        return f"{self._path}.{name}.output", f"{self._path}.{name}.input", f"{self._path}.{name}.skip"


def wait_for(location: str, visit: int) -> Any:
    """Called in a block: pause until `location` is reached for the visit of this number; what it is served."""
    mediator = Mediator.current(location)
    mediator.iteration = visit  # asked for unpinned, the same visit would be served again and again
    served = Mediator.value(location)
    mediator.iteration = None
    return served


class _CheckedCaches(InterleavingTracer):
    """nnsight's tracer, whose ``cache(modules=)`` refuses paths that do not exist; nnsight's own keeps nothing."""

    def cache(self, *args: Any, **options: Any) -> Any:
        """nnsight's ``cache``.

        Raises:
            HookNameError: a path in its first argument, `modules`, that no module has.
        """
        paths = {envoy.path for envoy in self.envoy.modules()}
        for wanted in (args[0] if args else options.get("modules")) or ():
            if isinstance(wanted, str) and wanted not in paths:
                raise HookNameError(
                    f"no module has the path {wanted!r}.{nearest(wanted, paths)} A path begins with the name of the "
                    f"root, {self.envoy.path!r}; a module itself will do as well: cache(modules=[model.blocks[0]])."
                )
        return super().cache(*args, **options)


class Root(NNsight):
    """The root of a tree of modules that trace blocks can be opened on.

    Attributes:
        handover: what passes between the tree and the blocks.
    """

    def __init__(self, module: nn.Module) -> None:
        forwards = {part: part.__dict__["forward"] for part in module.modules() if "forward" in part.__dict__}
        super().__init__(module)
        self._forwards = {part: old for part, old in forwards.items() if not isinstance(old, Controller)}
        self.handover = Handover(self.interleaver, self.path)

    def unwrap(self, module: nn.Module) -> None:
        """Take this root's wrapper from `module` and everything below it; other roots keep theirs."""
        for part in module.modules():
            state = part.__dict__.get(STATE)
            if state is None:
                continue
            state.routes = [route for route in state.routes if route[0]() not in (None, self.interleaver)]
            if not state.routes:
                del part.__dict__[STATE]
                self._restore_forward(part)

    def _restore_forward(self, part: nn.Module) -> None:
        before = self._forwards.get(part)
        if before is None:
            part.__dict__.pop("forward", None)
        else:
            part.__dict__["forward"] = before

    @property
    def wrapped(self) -> Any:
        """The module itself."""
        return self._module

    @property
    def has_edits(self) -> bool:
        """Whether it carries edits of ``edit()``."""
        return bool(self._edits)

    def has_child(self, name: str) -> bool:
        """Whether a module is called `name` directly below the root."""
        return name in self._child_map

    def trace(self, *args: Any, tracer_cls: Any = None, **kwargs: Any) -> Any:
        """nnsight's ``trace``: a block over one pass."""
        return super().trace(*args, tracer_cls=tracer_cls or _CheckedCaches, **kwargs)

    def count_rows(self, *inputs: Any, **kwargs: Any) -> int:
        """Rows of the batch that the inputs of an invoke make; 0 without inputs."""
        raise NotImplementedError

    def join(self, invokes: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Arguments and keyword arguments of one pass over the inputs of several invokes."""
        raise NotImplementedError

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        return self.count_rows(*inputs, **kwargs)

    def _batch(self, invokes: list[tuple], fn: Any) -> tuple:
        return self.join(invokes)


class BlockTracer(_CheckedCaches):
    """A block whose body runs beside `carry_out`, whatever that does."""

    def __init__(self, root: Root) -> None:
        super().__init__(root, "__call__")
        self.info: InterleavingTracer.Info | None
        self._root = root

    def begin(self) -> None:
        """Called before the block runs."""

    def carry_out(self) -> Any:
        """What the block runs beside; what it returns is the tracer's ``result``."""
        raise NotImplementedError

    def end(self) -> None:
        """Called when the block has run, also after an error."""

    def rows(self) -> "Rows":
        """Which rows of the values the block sees."""
        raise NotImplementedError

    @staticmethod
    def source(filename: str) -> str:
        """nnsight's reader of the source that a block stands in.

        Raises:
            SinklensError: there is none, as in a plain REPL or exec'd code.
        """
        text = InterleavingTracer.source(filename)
        if not text:
            raise SinklensError(
                f"the body of a trace is read as source, and {filename} has none (a plain REPL, or code run by exec). "
                f"Write it in a file or a notebook, or use sinklens.generate(..., hooks=[(name, fn)]): it needs none."
            )
        return text

    def execute(self, code: CodeType) -> None:
        """Run the captured body, then hand the names it assigned back to its frame."""
        self.begin()
        assert self.info is not None
        frame, root, rows = self.info.frame, self._root, self.rows()
        mediator = Mediator(code, frame.f_globals, dict(frame.f_locals), node=self.node)
        mediator.batch_group = [0, rows.seen]
        root.interleaver.mediators.append(mediator)
        try:
            root.interleave(self.carry_out, batcher=_FirstRows(root, rows))
        except Exception as error:  # noqa: BLE001 — whatever it is, only its traceback is shortened
            raise error.with_traceback(_block_frames(error, frame.f_code.co_filename)) from error.__cause__
        finally:
            root.interleaver.cancel()
            self.info = None
            self.end()
        push(frame, mediator.lcls.writes())


class Rows(NamedTuple):
    """Rows of the values in a block.

    Attributes:
        seen: the first so many are seen and edited.
        total: of which the pass has so many.
    """

    seen: int
    total: int


class _FirstRows(Batcher):
    """A block sees the first rows of each value that has all; and values of any other length as they are."""

    def __init__(self, root: Root, rows: Rows) -> None:
        super().__init__(root)
        self.total, self._narrows = rows.total, rows.seen < rows.total

    @property
    def batching(self) -> bool:
        return self._narrows


def replace_body(module: nn.Module, old: Callable[..., Any], new: Callable[..., Any]) -> Callable[[], Any]:
    """Let nnsight's controller of `module` run `new(module, ...)` where it runs the unbound forward `old` now.

    Wrapping a module, nnsight takes the `forward` of the instance and remembers the one of its class, so a forward
    that a class gets later would be passed by. Nothing happens where nnsight has not wrapped `module`, or runs a
    forward that somebody put there.

    Returns:
        What undoes it, also where nnsight wraps `module` later.
    """
    state = module.__dict__.get(STATE)
    if state is not None and state.original is old:
        state.body = state.original = new
        state.sourced, state.compiled = False, None  # `.source` is read from the new one
    return lambda: replace_body(module, new, old)


def _block_frames(error: Exception, filename: str) -> TracebackType | None:
    """The traceback of an error, from the first line of the block on; all of it if no line of the block is in it."""
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename != filename:
        entry = entry.tb_next
    return entry if entry is not None else error.__traceback__
