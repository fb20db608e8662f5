"""Does the same with several models, one after the other, also after one of them has failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from blobstore.core.progress import of_items
from blobstore.errors import BlobstoreError, InvalidReference, MissingLibrary, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.core.progress import Progress

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[_Result]):
    """The outcome for one model: a result or an error."""

    name: str
    """The name of the model here; the address of a pull."""
    result: _Result | None = None
    error: BlobstoreError | None = None


def each_of(
    names: Sequence[str],
    sizes: Sequence[int],
    progress: Progress | None,
    act: Callable[[int, Progress | None], _Result],
) -> Iterator[Outcome[_Result]]:
    """Yield the outcome for each model, one after the other. Raise errors that all of them would have."""
    for number, name in enumerate(names):
        step = of_items(progress, "models", names, sizes, number)
        try:
            result = act(number, step)
        except MissingLibrary:
            raise  # it would fail for all of them
        except BlobstoreError as error:
            if isinstance(error, UsageError) and not isinstance(error, InvalidReference):
                raise  # an option is wrong, for all of them
            yield Outcome(name=name, error=error)
        else:
            yield Outcome(name=name, result=result)
