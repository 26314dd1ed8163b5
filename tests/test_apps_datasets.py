from __future__ import annotations

import csv
import sys

import numpy as np
import pytest
import torch

from corrnoise.apps import datasets, models


def test_digits_are_split_without_overlap():
    data = datasets.load("digits")
    rows = torch.cat([data.train.inputs, data.test.inputs]).flatten(1)
    assert len(rows) == 1797
    assert rows.min() == 0
    assert rows.max() == 1
    again = datasets.load("digits")
    assert torch.equal(again.test.inputs, data.test.inputs)
    other = datasets.load("digits", seed=1)
    assert not torch.equal(other.test.inputs, data.test.inputs)


@pytest.mark.parametrize("split", [True, False])
def test_npz(tmp_path, split):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)
    y = generator.integers(0, 3, 30)
    names = {"x_train": x[:20], "y_train": y[:20], "x_test": x[20:], "y_test": y[20:]}
    np.savez(tmp_path / "mine.npz", **(names if split else {"x": x, "y": y}))
    data = datasets.load(str(tmp_path / "mine.npz"))
    assert data.shape == (3, 8, 8)
    assert (len(data.train), len(data.test)) == ((20, 10) if split else (24, 6))
    assert data.train.inputs.min() >= -1
    assert data.train.inputs.max() <= 1
    if split:
        assert data.train.inputs[0, 2, 5, 1] == pytest.approx(x[0, 5, 1, 2] / 127.5 - 1, abs=1e-6)
        named = datasets.load("cifar10", path=tmp_path / "mine.npz")
        assert torch.equal(named.train.inputs, data.train.inputs)
        assert named.name == "cifar10"


def test_csv_with_a_range_that_the_user_names(tmp_path):
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "kind", "weight"])
        for k in range(40):
            writer.writerow([k, "yes" if k % 2 else "no", 100 - k])
    data = datasets.load(str(path), label="kind", value_range=(0, 50))
    assert data.num_classes == 2
    both = torch.cat([data.train.inputs, data.test.inputs])
    assert both.shape == (40, 2)
    assert both.min() == 0.0
    assert both.max() == 1.0  # weights above the range are cut
    with pytest.raises(ValueError, match="label must be a column"):
        datasets.load(str(path), label="size")
    with pytest.raises(ValueError, match="numbers in all columns"):
        datasets.load(str(path))
    with pytest.raises(ValueError, match="value_range must go from low to high"):
        datasets.load(str(path), label="kind", value_range=(50, 0))
    for text in ("", "age,kind\n", "age,kind\n1,no\n2\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="a header of at least two columns"):
            datasets.load(str(path))


def test_a_folder_of_pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, value in (("cat", 0), ("dog", 255)):
        (tmp_path / name).mkdir()
        for k in range(5):
            image.new("L", (9, 7), value).save(tmp_path / name / f"{k}.png")
    data = datasets.load(str(tmp_path), image_size=8)
    assert data.shape == (3, 8, 8)
    for x, y in (data.train[0], data.train[5], data.test[0]):
        assert x.mean() == (1.0 if y else -1.0)


def test_imdb_from_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for part in ("train", "test"):
        table = pyarrow.table({"text": ["Good, good!", "bad", ""], "label": [1, 0, 0]})
        parquet.write_table(table, tmp_path / f"{part}-0.parquet")
    data = datasets.load("imdb", path=tmp_path)
    assert data.shape == (4096,)
    norms = data.train.inputs.norm(dim=1)
    assert norms.tolist() == pytest.approx([1.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "must have arrays"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2, int)}, "one label for each example"),
        ({"x": np.full((9, 2), np.nan), "y": np.arange(9) % 2}, "finite"),
        ({"x": np.zeros((9, 2)), "y": np.zeros(9, int)}, "labels 0, 1"),
        ({"x": np.zeros((9, 2)), "y": np.arange(9) - 1}, "labels 0, 1"),
        ({"x": np.zeros((9, 2)), "y": np.array(["cat"] * 9)}, "labels 0, 1"),
    ],
)
def test_bad_files_are_named(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        datasets.load(str(tmp_path / "bad.npz"))


def test_bad_sources_are_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        datasets.load("mnist")
    (tmp_path / "x.npz").write_text("no arrays")
    with pytest.raises(ValueError, match=r"must be an \.npz of plain arrays"):
        datasets.load(str(tmp_path / "x.npz"))
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ValueError, match=r"must be an \.npz"):
        datasets.load(str(tmp_path / "x.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="folder of pictures for each class"):
        datasets.load(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="parquet file for 'train'"):
        datasets.load("imdb", path=tmp_path)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[demo\]'"):
        datasets.load("digits")


@pytest.mark.parametrize("name", models.MODELS)
def test_models_take_their_shapes(name):
    net = models.build(name, (3, 16, 16), 7)
    assert net(torch.zeros(2, 3, 16, 16)).shape == (2, 7)
    assert models.build("auto", (4,), 3)(torch.zeros(5, 4)).shape == (5, 3)


def test_a_model_is_built_by_its_seed_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    first, again = (models.build("mlp", (4,), 3, seed=7) for _ in range(2))
    assert torch.equal(torch.rand(4), expected)
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    torch.manual_seed(7)
    assert torch.equal(torch.nn.Linear(4, 128).weight, first[1].weight)


def test_the_paper_network_has_its_size():
    # 6 convolutions of 3x3 and a linear layer 2048 -> 10.
    widths = [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    size = sum(a * b * 9 + b for a, b in widths) + 2048 * 10 + 10
    net = models.build("auto", (3, 32, 32), 10)
    assert sum(p.numel() for p in net.parameters()) == size


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="use 'mlp'"):
        models.build("convnet", (1, 4, 4), 2)
    with pytest.raises(ValueError, match="model must be one of auto, linear, mlp, convnet, got"):
        models.build("resnet", (3, 32, 32), 2)
