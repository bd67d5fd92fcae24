"""Datasets of torch and of Hugging Face's library become the arrays that they hold; what cannot is refused by name."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import fedabml
from fedabml.data.client_datasets import pad_tokens
from fedabml.errors import InputError

from_datasets = fedabml.Federation.from_datasets


class Rows(Dataset):
    """A user's own dataset: pairs of a tensor and a number, made when they are asked for."""

    def __init__(self, seed, n=6):
        self.x, self.n, self.read = np.random.default_rng(seed).normal(size=(n, 4)), n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(i)
        return torch.as_tensor(self.x[i]), int(i % 2)


class Table:
    """As Hugging Face's Dataset: columns by name, rows as dictionaries by number; without its library."""

    def __init__(self, **columns):
        self.columns, self.column_names = columns, list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.columns.items()}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), 0)])


def test_torch_datasets_are_the_arrays_they_hold():
    sites = {"north": Rows(0), "south": Rows(1, 8)}
    fed = from_datasets(sites, {"south": TensorDataset(torch.ones(3, 4), torch.tensor([0, 1, 1]))})
    same = fedabml.Federation.from_arrays(
        [(site.x, np.arange(site.n) % 2) for site in sites.values()],
        [None, (np.ones((3, 4)), np.array([0, 1, 1]))],
        names=["north", "south"],
    )
    assert fed.hash == same.hash and fed.names == ("north", "south") and fed.padding is None
    assert sites["north"].read == list(range(6))


def test_columns_of_hugging_face_datasets_are_chosen_by_name():
    x = np.random.default_rng(0).normal(size=(6, 3))
    tables = {name: Table(features=x.tolist(), label=[0, 1] * 3, text=["a"] * 6) for name in ("a", "b")}
    fed = from_datasets(tables, x="features", y="label")
    assert np.allclose(fed.x[:6], x) and fed.y[:6].tolist() == [0, 1] * 3
    both = {"a": {"train": tables["a"], "validation": tables["b"], "test": tables["b"]}, "b": tables["b"]}
    split = from_datasets(both, x="features", y="label")
    assert [split.rows(name).counts.tolist() for name in ("train", "val", "test")] == [[6, 6], [6, 0], [6, 0]]


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 4)])
def test_images_are_bytes_with_channels_first(mode, channels):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 5, channels)).astype(np.uint8)
    pictures = [image.fromarray(p[..., 0] if channels == 1 else p) for p in pixels]
    fed = from_datasets({"a": Table(image=pictures, label=[0, 1, 0, 1])}, x="image", y="label")
    assert fed.x.dtype == np.uint8 and np.array_equal(fed.x, pixels.transpose(0, 3, 1, 2))
    pictures[2] = pictures[2].convert("CMYK") if channels == 3 else image.new("F", (5, 3))
    with pytest.raises(InputError, match=r"item 2: x is an image of mode (CMYK|F)"):
        from_datasets({"a": Table(image=pictures, label=[0, 1, 0, 1])}, x="image", y="label")


def test_sequences_are_padded_with_the_number_that_is_given():
    tokens = [[5, 6, 7], [8], [9, 3], [1, 2, 3, 4]]
    fed = from_datasets({"a": [(t, i % 2) for i, t in enumerate(tokens)]}, padding=0)
    assert fed.x.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0], [9, 3, 0, 0], [1, 2, 3, 4]] and fed.padding == 0
    assert not np.any(fed.shift) and np.all(fed.scale == 1)
    steps = from_datasets({"a": [(t, [1] * len(t)) for t in tokens]}, padding=0, task="sequence")
    assert steps.y.tolist() == [[1, 1, 1, -1], [1, -1, -1, -1], [1, 1, -1, -1], [1, 1, 1, 1]]
    masks = [[1, 1, 1, 0], [1, 1, 0, 0]]
    table = Table(input_ids=[[5, 6, 7, 0], [8, 9, 0, 0]], attention_mask=masks, label=[0, 1])
    assert from_datasets({"a": table}, x="input_ids", y="label", padding=0).x.tolist() == table.columns["input_ids"]
    for padding, says in (
        (1, "attention_mask does not mark the tokens that are 1"),
        (None, "Give the token number of"),
    ):
        with pytest.raises(InputError, match=says):
            from_datasets({"a": table}, x="input_ids", y="label", padding=padding)


PAIRS = [(np.zeros(2), 0), (np.ones(2), 1)]


@pytest.mark.parametrize(
    ("sites", "words", "says"),
    [
        ({}, {}, "There are no clients"),
        ({"a": Stream()}, {}, "client 'a', train data: (Stream has no length|the dataset has no length).*list"),
        ({"a": (pair for pair in PAIRS)}, {}, r"generator has no length.*list\(dataset\)"),
        ({"a": [np.zeros(2)] * 3}, {}, r"item 0 is .*; a pair \(x, y\) is needed"),
        ({"a": Table(image=[1, 2], label=[0, 1])}, {}, "is a dictionary with image, label. Name the two"),
        (
            {"a": Table(image=[1, 2], label=[0, 1])},
            {"x": "imag", "y": "label"},
            "no entry 'imag'. Did you mean 'image'",
        ),
        ({"a": [("words", 0), ("more", 1)]}, {}, "item 0: x is 'words'; numbers are needed"),
        ({"a": [([1, 2], 0), ([1], 1)]}, {}, "different lengths.*padding=0"),
        ({"a": [([1.5, 2], 0), ([1.5], 1)]}, {"padding": 0}, "padding is for sequences of whole numbers"),
        ({"a": [(np.zeros((2, 2)), 0), (np.zeros((3, 2)), 1)]}, {}, r"different shapes, \(2, 2\) and \(3, 2\)"),
        ({"a": [([0, 0], 0), ([1], 1)]}, {"padding": 0}, "sequence 0 has no token but padding"),
        ({"a": [([1, -4], 0), ([1], 1)]}, {"padding": 0}, "sequence 0 has a token outside 0"),
        ({"a": {"training": PAIRS}}, {}, "splits must be called train, validation and test"),
        ({"a": PAIRS}, {"test": {"b": PAIRS}}, "test data of 'b', but no training data"),
        ({"a": PAIRS[:1]}, {}, "client 'a' .* has 1 training sample"),
        ({"a": [(np.zeros(2), [0, 1]), (np.zeros(2), 1)]}, {}, "targets have different shapes"),
        (
            {"a": [([1, 2, 3, 4], [0, 1, 0, 1]), ([1, 2], [0, 1, 1, 1])]},
            {"padding": 0, "task": "sequence"},
            "train data: sequence 1 has 2 tokens and 4 labels",
        ),
        ({"a": {"train": PAIRS, "test": PAIRS}}, {"test": {"a": PAIRS}}, r"'a' has test data in its own .* test=, too"),
        ({"a": {"train": PAIRS, "validation": PAIRS}}, {"val": {"a": PAIRS}}, "'a' has validation data in its own"),
        (
            {"a": Table(ids=[[1, 2, 3], [4, 5]], token_type_ids=[[0, 0, 0], [0, 1]], label=[0, 1])},
            {"x": "ids", "y": "label", "padding": 0},
            "item 1: its token_type_ids are not all 0",
        ),
    ],
)
def test_what_is_no_dataset_of_pairs_is_refused_by_name(sites, words, says):
    with pytest.raises(InputError, match=says):
        from_datasets(sites, **words)


def test_an_error_of_a_users_dataset_names_the_item():
    class Broken(Rows):
        def __getitem__(self, i):
            return self.x[i], 1 // (3 - i)

    with pytest.raises(InputError, match="client 'a', train data: item 3 cannot be read: ZeroDivisionError"):
        from_datasets({"a": Broken(0)})


def test_a_longer_sequence_than_the_model_takes_is_refused():
    assert pad_tokens([[1, 2]], 0, 3, "x").tolist() == [[1, 2, 0]]
    with pytest.raises(InputError, match="sequence 0 has 4 tokens; at most 3 are taken"):
        pad_tokens([[1, 2, 3, 4]], 0, 3, "x")


def test_names_of_a_torch_datasets_classes_are_kept_and_must_agree():
    one, other, unnamed = Rows(0), Rows(1), Rows(2)
    one.classes, other.classes = ["cat", "dog"], ["dog", "cat"]
    parts = {"a": Subset(one, [0, 1, 2]), "b": ConcatDataset([one, unnamed]), "c": unnamed}
    assert from_datasets(parts).class_names == ("cat", "dog")
    assert from_datasets({"c": unnamed}).class_names == ("0", "1")
    for mixed in (Subset(other, [0, 1]), ConcatDataset([one, other])):
        with pytest.raises(
            InputError, match=r"client 'b'.*class 0 is 'dog', but in client 'a', train data it is 'cat'"
        ):
            from_datasets({"a": one, "b": mixed})
    other.target_transform = lambda label: 1 - label  # its class numbers are no longer those of its names
    assert from_datasets({"a": one, "b": other}).class_names == ("cat", "dog")


def test_names_of_labels_are_no_names_of_their_values(tmp_path):
    """Two labels that are yes or no have two names, and their values 0 and 1 have none."""
    rows = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    marks = (rows[:, :2] > 0).astype(np.int64)
    parts = {name: TensorDataset(torch.as_tensor(rows), torch.as_tensor(marks)) for name in "ab"}
    for part in parts.values():
        part.classes = ["urgent", "contagious"]
    fed = from_datasets(parts, task="multilabel")
    assert fed.named_classes == ()
    run = fedabml.train(fed, "mlr", rounds=1, participation=1.0, evaluate=False)
    assert fedabml.load_prior(run.prior.save(tmp_path / "prior.safetensors")).digest == run.prior.digest
    five = TensorDataset(torch.as_tensor(rows), torch.as_tensor(np.tile(marks, 3)[:, :5]))
    five.classes = list("vwxyz")
    assert from_datasets({"a": five, "b": five}, task="multilabel", classes=2).named_classes == ()
