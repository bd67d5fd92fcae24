"""Datasets of Hugging Face's own library as the data of clients; skipped where the library is not installed."""

import numpy as np
import pytest

import fedabml
from fedabml.errors import InputError

datasets = pytest.importorskip("datasets")
from_datasets = fedabml.Federation.from_datasets
QUICK = {"rounds": 1, "participation": 1.0, "epochs": 1, "device": "cpu"}


def table(seed, n=12):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    columns = {"features": x.tolist(), "label": [i % 2 for i in range(n)], "text": ["a word"] * n}
    features = datasets.Features(
        features=datasets.Sequence(datasets.Value("float32")),
        label=datasets.ClassLabel(names=["no", "yes"]),
        text=datasets.Value("string"),
    )
    return x, datasets.Dataset.from_dict(columns, features=features)


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_a_dataset_is_the_arrays_that_it_holds(form):
    sites = {name: table(seed) for seed, name in enumerate(("north", "south"))}
    fed = from_datasets({name: site.with_format(form) for name, (_, site) in sites.items()}, x="features", y="label")
    same = fedabml.Federation.from_arrays([(x, np.arange(12) % 2) for x, _ in sites.values()], names=list(sites))
    assert fed.hash == same.hash and fed.task == "classification" and fed.names == ("north", "south")


def test_a_dictionary_of_datasets_has_splits_and_is_trained_and_personalised():
    whole = table(0, 40)[1].train_test_split(0.25, seed=0)
    assert isinstance(whole, datasets.DatasetDict)
    fed = from_datasets({"a": whole, "b": table(1)[1]}, x="features", y="label")
    assert [fed.rows(split).counts.tolist() for split in ("train", "val", "test")] == [[30, 12], [0, 0], [10, 0]]
    run = fedabml.train(fed, "mlr", **QUICK)
    assert np.isfinite(run.summary["nll"])


def test_pictures_of_a_dataset_are_decoded():
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3)).astype(np.uint8)
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    site = datasets.Dataset.from_dict(
        {"image": [image.fromarray(each) for each in pixels], "label": [0, 1, 0, 1]}, features=features
    )
    fed = from_datasets({"a": site}, x="image", y="label")
    assert fed.x.dtype == np.uint8 and np.array_equal(fed.x, pixels.transpose(0, 3, 1, 2))


def test_tokens_of_different_lengths_are_padded_and_a_tokenizers_mask_is_checked():
    tokens, tags = [[5, 2, 9], [4], [7, 7]], [[1, 0, 1], [0], [1, 1]]
    site = datasets.Dataset.from_dict({"input_ids": tokens, "tags": tags, "attention_mask": [[1, 1, 1], [1], [1, 1]]})
    fed = from_datasets({"a": site}, x="input_ids", y="tags", padding=0, task="sequence")
    assert fed.x.tolist() == [[5, 2, 9], [4, 0, 0], [7, 7, 0]] and fed.y.tolist() == [
        [1, 0, 1],
        [0, -1, -1],
        [1, 1, -1],
    ]
    hidden = site.map(lambda row: {"attention_mask": [0] * len(row["input_ids"])})
    with pytest.raises(InputError, match="attention_mask does not mark the tokens that are 0"):
        from_datasets({"a": hidden}, x="input_ids", y="tags", padding=0, task="sequence")


def test_what_cannot_be_a_clients_data_is_refused_by_name():
    _, site = table(0)
    with pytest.raises(InputError, match="IterableDataset has no length or no items by number"):
        from_datasets({"a": site.to_iterable_dataset()}, x="features", y="label")
    with pytest.raises(InputError, match=r"is a dictionary with features, label, text\. Name the two to use"):
        from_datasets({"a": site})
    with pytest.raises(InputError, match=r"item 0: x is 'a word'; numbers are needed"):
        from_datasets({"a": site}, x="text", y="label")
    with pytest.raises(InputError, match=r"has no entry 'labels'\. Did you mean 'label'"):
        from_datasets({"a": site}, x="features", y="labels")
    with pytest.raises(InputError, match="train is needed"):
        from_datasets({"a": datasets.DatasetDict(test=site)}, x="features", y="label")


def labelled(names, seed=0, rows=20):
    columns = {"v": [[float(i), 1.0] for i in range(rows)], "label": [i % 2 for i in range(rows)]}
    features = datasets.Features(v=datasets.Sequence(datasets.Value("float32")), label=datasets.ClassLabel(names=names))
    return datasets.Dataset.from_dict(columns, features=features)


def test_names_of_classes_are_kept_down_to_the_priors_file(tmp_path):
    names = ("cat", "dog", "eel")  # no row is an eel
    fed = from_datasets({"a": labelled([*names]), "b": labelled([*names])}, x="v", y="label")
    assert fed.class_names == names and fed.classes == 3 and fed.manifest_rows()["class_names"] == [*names]
    assert fed.select([0]).class_names == names
    prior = fedabml.train(fed, "mlr", evaluate=False, **QUICK).prior
    prior.save(tmp_path / "prior.safetensors")
    assert fedabml.load_prior(tmp_path / "prior.safetensors").input_spec.class_names == names


def test_clients_and_splits_with_other_names_of_classes_are_refused():
    one, other = labelled(["cat", "dog"]), labelled(["dog", "cat"])
    with pytest.raises(
        InputError, match="client 'b', train data: class 0 is 'dog', but in client 'a', train data it is"
    ):
        from_datasets({"a": one, "b": other}, x="v", y="label")
    with pytest.raises(InputError, match=r"client 'a', test data.*client 'a', train data"):
        from_datasets({"a": one}, {"a": other}, x="v", y="label")
    with pytest.raises(InputError, match=r"name 2 classes.*Leave classes out"):
        from_datasets({"a": one}, x="v", y="label", classes=3)
    with pytest.raises(InputError, match="class 2 is 'eel', but in client 'a', train data it is no class"):
        from_datasets({"a": one, "b": labelled(["cat", "dog", "eel"])}, x="v", y="label")
