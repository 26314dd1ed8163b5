"""Data for ``corrnoise train``: by name, or from the user's own file or folder.

Loading computes no statistics of the data (means, ranges, a vocabulary), as these would be further
releases. Pixels are divided by their largest possible value; columns of a table are
taken as they are, or mapped from a range that the user names; words are hashed.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch.utils.data import Dataset

from corrnoise import _checks as checks
from corrnoise import _extras

NAMES = ("digits", "fashion-mnist", "cifar10", "imdb")
_PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}
_WORDS = 4096


class Tensors(Dataset[Any]):
    """Examples as rows of two tensors; a whole batch is fetched at once."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        return self.inputs[at], self.labels[at]

    def to(self, device: str | torch.device) -> Tensors:
        """The same examples on another device."""
        return Tensors(self.inputs.to(device), self.labels.to(device))


def whole_batch(batch: Any) -> Any:
    """The collate function for ``Tensors``, whose batches are tensors already."""
    return batch


@dataclass(frozen=True)
class Data:
    """A classification problem.

    Attributes:
        name: the name in tables and reports.
        train: the private examples.
        test: examples that the guarantee does not cover.
        num_classes: the number of classes; labels are 0, 1, …
    """

    name: str
    train: Tensors
    test: Tensors
    num_classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train.inputs.shape[1:])


def load(
    source: str,
    *,
    path: str | Path | None = None,
    label: str | None = None,
    value_range: tuple[float, float] | None = None,
    image_size: int = 32,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Data:
    """Read a dataset.

    Args:
        source: one of ``NAMES``, or a path: an .npz with x_train, y_train, x_test, y_test (or x and
            y), a .csv with a header, or a folder with one folder of pictures for each class.
        path: the folder that has the files of a named dataset; by default torchvision or datasets
            downloads them.
        label: the column of a table to predict; the last by default.
        value_range: the range of a table's columns, which is mapped to [0, 1]. Choose it without
            looking at the data.
        image_size: the side length that pictures of a folder are resized to.
        test_fraction: the fraction that is held out if there is no test set.
        seed: the seed that chooses this fraction.

    >>> data = load("digits")
    >>> data.num_classes, data.shape, len(data.train), len(data.test)
    (10, (1, 8, 8), 1437, 360)
    """
    if source in NAMES:
        place = None if path is None else Path(path)
        if source == "digits":
            return _digits(test_fraction, seed)
        if source == "imdb":
            return _imdb(place)
        return _pictures(source, place)
    place = Path(source)
    if not place.exists():
        raise ValueError(
            f"data must be one of {', '.join(NAMES)} or a path, got {source!r}, which does not "
            "exist"
        )
    if place.is_dir():
        return _folder(place, image_size, test_fraction, seed)
    if place.suffix == ".npz":
        return _npz(place, place.stem, test_fraction, seed)
    if place.suffix == ".csv":
        return _csv(place, label, value_range, test_fraction, seed)
    raise ValueError(f"data must be an .npz, a .csv or a folder of pictures, got {place}")


def _digits(test_fraction: float, seed: int) -> Data:
    found: Any = _extras.load("sklearn.datasets").load_digits()
    return _split("digits", found.images[:, None] / 16.0, found.target, test_fraction, seed)


def _pictures(name: str, place: Path | None) -> Data:
    """CIFAR-10 and Fashion-MNIST, from an .npz or through torchvision."""
    if place is not None and place.is_dir() and (place / f"{name}.npz").exists():
        place = place / f"{name}.npz"
    if place is not None and place.suffix == ".npz":
        return _npz(place, name, 0.2, 0)
    try:
        datasets: Any = import_module("torchvision.datasets")
    except ImportError:
        raise ValueError(
            f"data={name!r} needs torchvision, which is not installed, or an .npz with x_train, "
            "y_train, x_test and y_test: pass its path"
        ) from None
    kind: Any = {"cifar10": datasets.CIFAR10, "fashion-mnist": datasets.FashionMNIST}[name]
    root = str(place or Path.home() / ".cache" / "corrnoise")
    parts = [kind(root, train=train, download=place is None) for train in (True, False)]
    (x, y), (x_test, y_test) = ((np.asarray(p.data), np.asarray(p.targets)) for p in parts)
    return _checked(name, _images(x), y, _images(x_test), y_test)


def _imdb(place: Path | None) -> Data:
    """Reviews as hashed words: counts of 4,096 buckets, log-scaled, of length 1."""
    (text, y), (text_test, y_test) = (reviews(place, part) for part in ("train", "test"))
    return _checked("imdb", _hashed(text), np.array(y), _hashed(text_test), np.array(y_test))


def reviews(place: Path | None, part: str) -> tuple[list[str], list[int]]:
    """Texts and labels of IMDB, "train" or "test", from parquet files or by datasets."""
    if place is None:
        try:
            found: Any = import_module("datasets").load_dataset("imdb")
        except ImportError:
            raise ValueError(
                "data='imdb' needs the package datasets, which is not installed, or a folder with "
                "train and test as parquet files with columns text and label: pass its path"
            ) from None
        return found[part]["text"], found[part]["label"]
    files = sorted(place.rglob(f"*{part}*.parquet"))
    if not files:
        raise ValueError(f"path must have a parquet file for {part!r}, got {place} without one")
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError("parquet files need the package pyarrow; install it") from None
    tables: list[Any] = [parquet.read_table(f, columns=["text", "label"]) for f in files]
    text = [value for table in tables for value in table["text"].to_pylist()]
    return text, [value for table in tables for value in table["label"].to_pylist()]


def _hashed(texts: Sequence[str]) -> np.ndarray[Any, Any]:
    result = np.zeros((len(texts), _WORDS), np.float32)
    for row, text in enumerate(texts):
        for word in re.findall(r"[a-z']+", text.lower()):
            result[row, zlib.crc32(word.encode()) % _WORDS] += 1.0
    result = np.log1p(result)
    return result / np.maximum(np.linalg.norm(result, axis=1, keepdims=True), 1e-6)


def _npz(place: Path, name: str, test_fraction: float, seed: int) -> Data:
    try:
        with np.load(place, allow_pickle=False) as file:
            found = {key.lower(): file[key] for key in file.files}
    except (ValueError, EOFError, BadZipFile) as problem:
        raise ValueError(f"{place} must be an .npz of plain arrays: {problem}") from None
    if {"x_train", "y_train", "x_test", "y_test"} <= set(found):
        return _checked(
            name,
            _images(found["x_train"]),
            found["y_train"],
            _images(found["x_test"]),
            found["y_test"],
        )
    if {"x", "y"} <= set(found):
        return _split(name, _images(found["x"]), found["y"], test_fraction, seed)
    raise ValueError(
        f"{place} must have arrays x_train, y_train, x_test, y_test, or x and y, "
        f"got {', '.join(sorted(found))}"
    )


def _csv(
    place: Path,
    label: str | None,
    value_range: tuple[float, float] | None,
    test_fraction: float,
    seed: int,
) -> Data:
    with place.open(newline="") as file:
        header, *rows = [row for row in csv.reader(file) if row] or [[]]
    if len(header) < 2 or not rows or any(len(row) != len(header) for row in rows):
        raise ValueError(
            f"{place} must have a header of at least two columns, and below it rows with a value "
            "in each of them"
        )
    label = header[-1] if label is None else label
    if label not in header:
        raise ValueError(f"label must be a column of {place}, got {label!r}; it has {header}")
    at = header.index(label)
    names = sorted({row[at] for row in rows})
    y = np.array([names.index(row[at]) for row in rows])
    try:
        x = np.array([[float(v) for k, v in enumerate(row) if k != at] for row in rows])
    except ValueError as error:
        raise ValueError(
            f"{place} must have numbers in all columns but {label!r}: {error}"
        ) from None
    if value_range is not None:
        low, high = value_range
        if not low < high:
            raise ValueError(f"value_range must go from low to high, got {low:g} {high:g}")
        x = (np.clip(x, low, high) - low) / (high - low)
    return _split(place.stem, x, y, test_fraction, seed)


def _folder(place: Path, size: int, test_fraction: float, seed: int) -> Data:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("a folder of pictures needs the package pillow; install it") from None
    classes = sorted(p.name for p in place.iterdir() if p.is_dir())
    images: list[Any] = []
    labels: list[int] = []
    for number, name in enumerate(classes):
        for file in sorted((place / name).iterdir()):
            if file.suffix.lower() in _PICTURES:
                try:
                    with Image.open(file) as image:
                        images.append(np.asarray(image.convert("RGB").resize((size, size))))
                except OSError as problem:
                    raise ValueError(f"{file} must be a picture: {problem}") from None
                labels.append(number)
    if len(classes) < 2 or not images:
        raise ValueError(
            f"data must be a folder with a folder of pictures for each class, got {place} with "
            f"{len(classes)} folders and {len(images)} pictures"
        )
    return _split(place.name, _images(np.stack(images)), np.array(labels), test_fraction, seed)


def _images(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert images of bytes to [-1, 1], channels first; other arrays are not changed."""
    if x.dtype != np.uint8:
        return x
    x = x[:, None] if x.ndim == 3 else np.moveaxis(x, -1, 1) if x.ndim == 4 else x
    return x.astype(np.float32) / 127.5 - 1.0


def _split(name: str, x: Any, y: Any, test_fraction: float, seed: int) -> Data:
    count = len(y)
    if len(x) != len(y):
        raise ValueError(
            f"{name} must have one label for each example, got {len(x)} examples and "
            f"{len(y)} labels"
        )
    share = checks.probability("test_fraction", test_fraction)
    order = np.random.default_rng(seed).permutation(count)
    held, rest = np.split(order, [-(-int(count * share * 1000) // 1000)])
    return _checked(name, x[rest], y[rest], x[held], y[held])


def _checked(name: str, x: Any, y: Any, x_test: Any, y_test: Any) -> Data:
    parts = [np.asarray(v) for v in (x, y, x_test, y_test)]
    for inputs, labels in (parts[:2], parts[2:]):
        if len(inputs) != len(labels) or labels.ndim != 1 or len(labels) == 0:
            raise ValueError(
                f"{name} must have one label for each example, got inputs of shape "
                f"{inputs.shape} and labels of shape {labels.shape}"
            )
        if labels.dtype.kind not in "biuf":
            raise ValueError(f"{name} must have labels 0, 1, …, got values of type {labels.dtype}")
        if not np.isfinite(inputs.astype(np.float64).sum()):
            raise ValueError(f"{name} must have finite values, got NaN or infinity")
    classes = int(max(parts[1].max(), parts[3].max())) + 1
    if min(parts[1].min(), parts[3].min()) < 0 or classes < 2:
        raise ValueError(f"{name} must have labels 0, 1, …, got {parts[1].min()} to {classes - 1}")
    tensors = [
        torch.as_tensor(np.ascontiguousarray(v), dtype=kind)
        for v, kind in zip(parts, (torch.float32, torch.int64) * 2, strict=True)
    ]
    return Data(name, Tensors(*tensors[:2]), Tensors(*tensors[2:]), classes)
