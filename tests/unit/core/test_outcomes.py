from __future__ import annotations

import pytest

from blobstore.core.outcomes import Outcome, each_of
from blobstore.core.progress import Progress
from blobstore.errors import (
    BlobMissing,
    BlobstoreError,
    InvalidReference,
    MissingLibrary,
    UsageError,
)


def outcomes(*errors: BlobstoreError | None) -> list[Outcome[int]]:
    def act(number: int, step: Progress | None) -> int:
        assert step is None
        if (error := errors[number]) is not None:
            raise error
        return number

    names = [f"m{number}" for number in range(len(errors))]
    return list(each_of(names, [1] * len(names), None, act))


def test_one_that_fails_does_not_keep_others_from_following() -> None:
    missing, unnamed = BlobMissing("gone"), InvalidReference("no name")
    assert outcomes(None, missing, unnamed, None) == [
        Outcome(name="m0", result=0),
        Outcome(name="m1", error=missing),
        Outcome(name="m2", error=unnamed),
        Outcome(name="m3", result=3),
    ]


@pytest.mark.parametrize("error", [UsageError("wrong option"), MissingLibrary("no library")])
def test_what_would_fail_for_all_ends_the_work(error: BlobstoreError) -> None:
    with pytest.raises(type(error)):
        outcomes(None, error, None)
