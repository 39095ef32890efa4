"""The caches that are composed of one library's passages, and the data files that they have
open."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .... import errors
from ....kv.options import CacheOptions
from ....kv.passages.context import Context, Passage
from ....kv.passages.early import EarlyReads
from ....kv.passages.extent import Extent
from ....kv.passages.library import Library, data_name
from ....kv.places import Places
from .cache import PassageCache
from .model import PassageModel
from .prompts import Prompts

#: Computes a passage of prompts anew: their passages, its number, and what was wrong with it.
Renew = Callable[[Prompts, int, errors.StorageError], Passage]


class OpenCaches:
    """Caches of prompts whose passages are there. Data files that one has done with serve the
    next.

    Args:
        model: whose passages they are.
        directories: of the library, and of rows that come behind passages.
        options: of both.

    Attributes:
        is_closed: no cache is made any more.
    """

    def __init__(self, model: PassageModel, directories: Sequence[str], options: CacheOptions):
        self._model, self._directories, self._options = model, list(directories), options
        self._idle: list[Places] = []
        self._caches = weakref.WeakSet[PassageCache]()
        self.is_closed = False

    @property
    def own_rows(self) -> dict[str, Any]:
        """Options of the cache of what comes behind passages."""
        names = ("engine", "device", "compute", "threads", "deadline_s")
        return {name: getattr(self._options, name) for name in names}

    @property
    def under_way(self) -> list[PassageCache]:
        """Those that are not closed."""
        return [each for each in self._caches if not each.is_closed]

    def make(
        self,
        library: Library,
        prompt: Prompts,
        renew: Renew,
        *,
        early: EarlyReads | None = None,
        first: bool = False,
        **options: Any,
    ) -> PassageCache:
        """The cache of prompts. It takes their pins with it, and reads that began early. `first`:
        only the first layer is asked for to begin with."""
        rows = self._model.rows
        places = self._opened() if any(each.extent for each in prompt.passages) else None
        try:
            context = Context(
                rows.shape,
                prompt.passages,
                rows.rotations,
                () if places is None else places.striped.devices,
                self._options.threads or 0,
                early,
                prompt.count,
            )
            context.layers = 1 if first else context.layers
            prompt.passages = context.passages
            context.renew = partial(renew, prompt)
            cache = PassageCache(
                self._model.module.config,
                self._directories,
                context,
                *prompt.ids(),
                prompt.reused,
                release=partial(_release, weakref.ref(self), context, places, library, prompt.pins),
                **self.own_rows | options,
            )
        except BaseException:
            if places is not None:
                places.close()
            raise
        self._caches.add(cache)
        return cache

    def _opened(self) -> Places:
        """The data files, open for one cache."""
        if self._idle:
            return self._idle.pop()
        names = [data_name(number) for number in range(len(self._directories))]
        places = Places(self._directories, self._options, names)
        try:
            places.open(self._model.device)
        except BaseException:
            places.close()
            raise
        return places

    def give_back(self, places: Places) -> None:
        """A cache has done with data files."""
        if self.is_closed or self._idle:
            places.close()
        else:
            self._idle.append(places)

    def close_all(self) -> None:
        """Closes the caches there are."""
        for cache in list(self._caches):
            cache.close()

    def close(self) -> None:
        """Closes the caches, and the data files."""
        self.close_all()
        self.is_closed = True
        while self._idle:
            self._idle.pop().close()


def _release(
    owner: weakref.ref[OpenCaches],
    context: Context,
    places: Places | None,
    library: Library,
    pins: list[Extent],
) -> None:
    """The end of a cache: its devices may serve the next one."""
    context.close()
    mine = owner()
    if places is not None:
        if mine is None:
            places.close()
        else:
            mine.give_back(places)
    library.leave(pins)
    pins.clear()
