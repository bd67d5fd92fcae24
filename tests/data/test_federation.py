"""Federations from arrays and folders: what they hold, and every input that is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

import fedabml
from fedabml.data import Federation, Rows, read_client
from fedabml.errors import InputError


def client(n=6, classes=3, shift=0.0, f=4):
    rng = np.random.default_rng(n)
    return rng.normal(size=(n, f)).astype(np.float32) + shift, np.arange(n) % classes


def federation(**options):
    return Federation.from_arrays([client(6), client(9), client(4)], [client(3)] * 3, **options)


def test_the_arrays_come_back_by_client():
    pairs = [client(6), client(9)]
    fed = Federation.from_arrays(pairs, [client(3), None], names=["a", "b"])
    assert (fed.clients, fed.classes, fed.task, fed.names) == (2, 3, "classification", ("a", "b"))
    for i, (x, y) in enumerate(pairs):
        np.testing.assert_array_equal(fed.x[fed.train[i]], x)
        np.testing.assert_array_equal(fed.y[fed.train[i]], y)
    assert fed.test.counts.tolist() == [3, 0] and fed.val.counts.tolist() == [0, 0]
    assert fed.label_counts().tolist() == [[2, 2, 2], [3, 3, 3]]
    json.dumps([fed.describe(), fed.manifest, fed.manifest_rows()])


def test_classes_are_named_by_the_data_the_dataset_or_their_numbers():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"site": ["a", "b"] * 6, "x": range(12), "ill": ["no", "yes", "yes"] * 4})
    assert Federation.from_frame(table, target="ill", client="site").class_names == ("no", "yes")
    assert federation().class_names == ("0", "1", "2") == federation(dataset="cifar10").class_names
    assert federation(dataset="cifar10", classes=10).class_names[:2] == ("airplane", "automobile")


def test_statistics_come_from_training_samples_only():
    fed = Federation.from_arrays([client(50)], [client(50, shift=1000.0)])
    seen = (fed.x[fed.train.index] - fed.shift) / fed.scale
    np.testing.assert_allclose(seen.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(seen.std(0), 1, atol=1e-6)


def test_validation_given_or_held_out_counts_as_training_for_statistics():
    fed = Federation.from_arrays([client(6)], val=[client(9)])
    both = np.concatenate([client(6)[0], client(9)[0]])
    np.testing.assert_allclose(fed.shift, both.mean(0), rtol=1e-5)
    np.testing.assert_array_equal(fed.hold_out(0.3).shift, fed.shift)


@pytest.mark.parametrize("shape", [(5, 8, 6), (5, 8, 6, 3), (5, 3, 8, 6), (5, 8, 6, 1), (5, 4, 4, 4)])
def test_images_become_channels_first(shape):
    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    fed = Federation.from_arrays([(x, np.zeros(5, int))])
    last = len(shape) == 4 and shape[1] not in (1, 3, 4)
    expected = x[:, None] if len(shape) == 3 else x.transpose(0, 3, 1, 2) if last else x
    np.testing.assert_array_equal(fed.x, expected)
    np.testing.assert_allclose(fed.shift.ravel(), expected.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(fed.scale.ravel(), expected.std((0, 2, 3)), rtol=1e-5)
    assert fed.shift.shape == (expected.shape[1], 1, 1)


def test_other_shapes_and_types():
    fed = Federation.from_arrays([(np.ones((4, 5, 2)), np.arange(4.0) / 8)])
    assert fed.x.dtype == np.float32 and fed.shift.shape == () and fed.scale == 1 and fed.y.shape == (4, 1)
    assert Federation.from_arrays([(np.arange(4), [0, 1, 0, 1])]).x.shape == (4, 1)
    assert Federation.from_arrays([(np.ones((4, 5), np.uint8), [0, 1, 0, 1])]).x.dtype == np.float32
    plain = federation(normalize="none")
    assert plain.shift == 0 and plain.scale == 1


def test_torch_tensors():
    x, y = client()
    fed = Federation.from_arrays([(torch.tensor(x, requires_grad=True), torch.tensor(y))])
    np.testing.assert_array_equal(fed.x, x)


def test_regression_targets_are_standardised():
    x, _ = client(40)
    y = np.stack([np.linspace(5, 9, 40), np.linspace(-1, 1, 40)], 1)
    fed = Federation.from_arrays([(x, y)])
    assert (fed.task, fed.classes, fed.y.dtype, fed.y.shape) == ("regression", 0, np.float32, (40, 2))
    np.testing.assert_allclose(((fed.y - fed.y_shift) / fed.y_scale).std(0), 1, rtol=1e-5)
    assert fed.label_counts().shape == (1, 0) and fed.hold_out(0.5).val.counts.tolist() == [20]


def test_task_overrides_the_type_of_the_labels():
    x, y = client()
    assert Federation.from_arrays([(x, y + 0.5)]).task == "regression"
    assert Federation.from_arrays([(x, y.astype(float))], task="regression").task == "regression"
    assert Federation.from_arrays([(x, y.astype(float))], task="classification").y.dtype == np.int64
    assert Federation.from_arrays([(x, y)], task="regression").y.dtype == np.float32
    assert Federation.from_arrays([(x, y)], classes=7).classes == 7


@pytest.mark.parametrize("y", [np.array([0.0, 1.0] * 3), np.eye(2)[[0, 1] * 3], torch.tensor([-1.0, 1.0] * 3)])
def test_labels_of_a_float_type_are_neither_classes_nor_measurements_silently(y):
    x, _ = client()
    for clients in ([(x, y)], [(x, np.zeros(6, np.int64)), (x, y)]):
        with pytest.raises(InputError, match=r"task='classification'.*argmax.*task='regression'"):
            Federation.from_arrays(clients)
    with pytest.raises(InputError, match="task='classification'"):
        Federation.from_owners(x.astype(np.float32), y, np.zeros(6, int))


def test_classes_at_one_client_and_measurements_at_another_are_refused():
    x, y = client()
    fractions = y + np.linspace(0, 0.5, len(y))
    with pytest.raises(InputError, match=r"client 'client-1'.*int64.*client 'client-0'.*float64.*task='regression'"):
        Federation.from_arrays([(x, fractions), (x, y)])
    assert Federation.from_arrays([(x, fractions), (x, y)], task="regression").classes == 0
    assert Federation.from_arrays([(x, y), (x, y)], [([], []), (x, y)]).classes == 3  # no labels have no type


def test_values_that_float32_would_merge_are_refused():
    """An offset far above the deviation: 240 values of 1e6 ± 1e-3 are 1 in float32."""
    g = np.random.default_rng(0)
    x, y, small = g.normal(size=(40, 2)), np.arange(40) % 2, np.array([1.0, 1e-3])
    with pytest.raises(InputError, match=r"client 'client-1'.*rounds feature 1 by up to 0\.\d+.*Subtract an offset"):
        Federation.from_arrays([(x * [1, 0] + np.array([0, 1e6]), y), (x * small + np.array([0, 1e6]), y)])
    Federation.from_arrays([(x + np.array([0, 1e3]), y), (np.full_like(x, 0.1), y)])
    Federation.from_arrays([(np.full_like(x, 0.1), y)])  # a constant loses nothing
    seconds = 1_700_000_000 + g.integers(0, 60, (40, 1))
    with pytest.raises(InputError, match="rounds feature 0"):
        Federation.from_arrays([(seconds, y)])
    far = 1e9 + x[:, 0]
    for read in (
        lambda: Federation.from_arrays([(x, far)]),
        lambda: Federation.from_owners(x.astype(np.float32), far, y),
    ):
        with pytest.raises(InputError, match="rounds target 0"):
            read()


def test_masked_values_are_refused_and_a_mask_without_any_is_not():
    x, y = client()
    x = x.astype(np.float32)
    for masked in (np.ma.masked_array(x, x == x[2]), [*np.ma.masked_array(x, x == x[2])]):
        with pytest.raises(InputError, match=r"masked value\(s\)\. Fill them, array.filled"):
            Federation.from_arrays([(masked, y)])
    with pytest.raises(InputError, match=r"y of client 'client-0' .*1 masked value"):
        Federation.from_arrays([(x, y)], [(x, np.ma.masked_array(y, [1, 0, 0, 0, 0, 0]))])
    with pytest.raises(InputError, match="x is a masked array"):
        Federation.from_owners(np.ma.masked_array(x, x == x[2]), y, np.zeros(6, int))
    np.testing.assert_array_equal(Federation.from_arrays([(np.ma.masked_array(x), y)]).x, x)


def with_value(value, column=None):
    x, y = client()
    x = x.astype(np.float64)
    x[2, 1] = value
    return x, y


BAD = {
    "NaN": ([client(), with_value(np.nan)], {}),
    "infinity": ([client(), with_value(np.inf)], {}),
    "beyond float32": ([client(), with_value(1e300)], {}),
    "label -1": ([client(), (client()[0], client()[1] - 1)], {}),
    "label 7": ([client(), (client()[0], client()[1] + 7)], {"classes": 3}),
    "label 0.5": ([client(), (client()[0], client()[1] + 0.5)], {"task": "classification"}),
    "label nan": ([client(), (client()[0], client()[1] * np.nan)], {"task": "classification"}),
    "has 1 training sample": ([client(), client(1)], {}),
    "drop_small": ([client(), client(0)], {}),
    r"shape \[5\]": ([client(), client(f=5)], {}),
    "uint8": ([client(), (np.zeros((6, 2, 2), np.uint8), client()[1])], {}),
    "x has 6 samples, y has 5": ([client(), (client()[0], client()[1][:5])], {}),
    "one class number": ([client(), (client()[0], np.zeros((6, 2), int))], {}),
    "<U1": ([client(), (client()[0], np.array(list("abcabc")))], {}),
    "object": ([client(), (client()[0].astype(object), client()[1])], {}),
    "no features": ([client(), client(f=0)], {}),
    "targets are": ([client(), (client()[0], np.zeros((6, 2)))], {"task": "regression"}),
    "axes": ([client(), (client()[0], np.zeros((6, 2, 2)))], {"task": "regression"}),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_data_name_the_client(words):
    pairs, options = BAD[words]
    with pytest.raises(InputError, match=words) as error:
        Federation.from_arrays(pairs, names=["ward-a", "ward-b"], **options)
    assert "'ward-b' (number 1)" in str(error.value)


def test_bad_regression_target():
    with pytest.raises(InputError, match="NaN"):
        Federation.from_arrays([(client()[0], np.full(6, np.nan))])


def test_a_test_label_that_training_never_showed():
    with pytest.raises(InputError, match=r"test data, sample 3, has the label 3.*classes="):
        Federation.from_arrays([client()], [client(6, classes=4)])


@pytest.mark.parametrize(
    ("train", "options", "words"),
    [
        ([], {}, "no clients"),
        ([client()], {"test": [client()] * 2}, "test data of 2"),
        ([client()], {"val": []}, "validation data of 0"),
        ([client()], {"names": ["a", "b"]}, "names of 2"),
        ([client()] * 2, {"names": ["a", "a"]}, "called 'a'"),
        ([client()], {"task": "clasification"}, "Did you mean 'classification'"),
        ([client()], {"normalize": "yes"}, "normalize"),
        ([client(1)], {"drop_small": True}, "none is left"),
        ([client()[0]], {}, "a pair \\(x, y\\) is needed"),
        ([client()], {"classes": 2.5}, "whole number"),
        ([(np.float32(3), np.zeros(1, int))], {}, "single number"),
        ([([[1], [1, 2]], [0, 1])], {}, "cannot be read as an array"),
    ],
)
def test_bad_calls(train, options, words):
    with pytest.raises(InputError, match=words):
        Federation.from_arrays(train, **options)


def test_names_may_be_numbers():
    assert Federation.from_arrays([client(), client()], names=[7, np.int64(3)]).names == ("7", "3")


def test_drop_small_leaves_them_out():
    fed = Federation.from_arrays([client(1), client(), client(0)], [client()] * 3, names=[*"abc"], drop_small=True)
    assert fed.names == ("b",) and fed.train.counts.tolist() == [6] and fed.test.counts.tolist() == [6]


@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_hold_out_takes_from_everyone_and_leaves_everyone_something(share):
    fed = Federation.from_arrays([client(n) for n in (2, 3, 20, 200)])
    held = fed.hold_out(share, seed=3)
    assert (held.train.counts >= 1).all() and (held.val.counts >= 1).all()
    for i in range(fed.clients):
        assert sorted([*held.train[i], *held.val[i]]) == sorted(fed.train[i])
    assert held.rows_hash == fed.hold_out(share, seed=3).rows_hash != fed.hold_out(share, seed=4).rows_hash
    assert held.manifest["hold_out"] == {"share": share, "seed": 3}


def test_hold_out_is_stratified_and_does_not_depend_on_the_company():
    fed = Federation.from_arrays([client(60), client(90), client(30)])
    held = fed.hold_out(0.2)
    assert held.label_counts("val").tolist() == [[4] * 3, [6] * 3, [2] * 3]
    alone = fed.select([1]).hold_out(0.2)
    np.testing.assert_array_equal(alone.val[0], held.val[1])
    assert alone.rows_hash == held.select([1]).rows_hash
    assert fed.hold_out(0) is fed
    for share in (1, -0.1, float("nan")):
        with pytest.raises(InputError, match="share"):
            fed.hold_out(share)


def test_hold_out_twice_adds_up():
    fed = Federation.from_arrays([client(20)])
    twice = fed.hold_out(0.5).hold_out(0.5)
    assert (twice.train.counts[0], twice.val.counts[0]) == (5, 15)


def test_select_shares_the_arrays():
    fed = federation(names=["a", "b", "c"])
    part = fed.select([2, 0])
    assert part.names == ("c", "a") and part.x is fed.x and part.manifest["selected"] == [2, 0]
    np.testing.assert_array_equal(part.train[0], fed.train[2])
    for wrong in ([3], [-1], []):
        with pytest.raises(InputError, match="client"):
            fed.select(wrong)
    with pytest.raises(InputError, match="Did you mean 'train'"):
        fed.label_counts("trian")


def test_the_hash_changes_with_data_and_rows():
    one, same = federation(), federation()
    assert one.hash == same.hash and len(one.hash) == 64
    other = Federation.from_arrays([client(6, shift=1.0), client(9), client(4)], [client(3)] * 3)
    assert len({one.hash, other.hash, one.hold_out(0.5).hash, one.select([1]).hash}) == 4


def save(path, **arrays):
    np.savez(path, **arrays)


def test_a_folder_of_clients(tmp_path):
    x, y = client()
    save(tmp_path / "south.npz", x=x, y=y)
    save(tmp_path / "north.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    fed = Federation.from_folder(tmp_path)
    assert fed.names == ("north", "south") and fed.test.counts.tolist() == [2, 0]
    assert fed.dataset == tmp_path.name


def test_read_client_gives_inputs_alone_when_asked(tmp_path):
    save(tmp_path / "a.npz", x=np.ones((3, 2)))
    assert list(read_client(tmp_path / "a.npz", labels=False)) == ["x_train"]
    with pytest.raises(InputError, match="lacks y_train"):
        read_client(tmp_path / "a.npz")


def test_bad_files_are_named(tmp_path):
    x, y = client()
    path = tmp_path / "a.npz"

    def refused(words):
        with pytest.raises(InputError, match=words) as error:
            Federation.from_folder(tmp_path)
        assert "a.npz" in str(error.value)

    save(path, x_train=x, y_train=y, x_test=x)
    refused("lacks y_test")
    save(path, y_train=y)
    refused("lacks x_train")
    save(path, x=x, y=y, x_train=x)
    refused("both x and x_train")
    save(path, x=x, y=y, x_tset=x)
    refused("Did you mean 'x_test'")
    save(path, x=np.array([{}, {}], dtype=object), y=y)
    refused("Python objects")
    save(path, x=x, y=y)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused("cut short")
    path.write_bytes(whole[:200] + bytes(40) + whole[240:])
    refused("damaged")
    path.write_bytes(b"not an archive")
    refused("not an .npz")
    path.write_bytes(b"")
    refused("not an .npz")
    path.unlink()
    path.mkdir()
    refused("is a folder, not a file")


def test_bad_folders(tmp_path):
    with pytest.raises(InputError, match=r"no \.npz"):
        Federation.from_folder(tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        Federation.from_folder(tmp_path / "nowhere")


def test_empty_rows():
    assert Rows.empty(3).counts.tolist() == [0, 0, 0]


# -- one array and the owner of every sample ------------------------------------------------------------------------
def owned(n=40, seed=0):
    g = np.random.default_rng(seed)
    return (
        g.normal(size=(n, 3)).astype(np.float32),
        g.integers(0, 4, n),
        g.choice(["b", "a", "c"], n),
        g.random(n) < 0.3,
    )


def test_owners_give_what_arrays_of_each_client_give():
    x, y, owner, test = owned()
    fed = Federation.from_owners(x, y, owner, test, classes=4)
    pick = lambda name, marks: (x[(owner == name) & marks], y[(owner == name) & marks])
    train, held = ([pick(name, marks) for name in "abc"] for marks in (~test, test))
    other = Federation.from_arrays(train, held, names=list("abc"), classes=4)
    assert fed.names == ("a", "b", "c") and fed.x is x
    for split in ("train", "test"):
        for c in range(3):
            assert np.array_equal(fed.x[fed.rows(split)[c]], other.x[other.rows(split)[c]])
            assert np.array_equal(fed.y[fed.rows(split)[c]], other.y[other.rows(split)[c]])
    np.testing.assert_allclose(fed.shift, other.shift, rtol=1e-6)
    assert fed.hold_out(0.2).val.counts.sum() > 0 and fed.manifest_rows()["rows"]["train"]


def test_a_file_is_read_where_it_lies(tmp_path):
    x, y, owner, test = owned()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    fed = Federation.from_owners(mapped, y, owner, test)
    assert fed.x is mapped and fed.hash == Federation.from_owners(x, y, owner, test).hash
    runs = [
        fedabml.train(Federation.from_owners(a, y, owner, test), "mlr", rounds=1, participation=1.0, device="cpu")
        for a in (x, mapped)
    ]
    assert runs[0].summary["nll"] == runs[1].summary["nll"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": np.zeros((40, 3))}, "float64 of shape"),
        ({"x": [[1.0]]}, "numpy array"),
        ({"owner": np.zeros(39, int)}, "owner must have one entry for each of the 40"),
        ({"y": np.zeros(7, int)}, "y must have one entry"),
        ({"test": np.zeros(40, int)}, "true and false"),
        ({"y": np.full(40, -1)}, r"client '[abc]'"),
    ],
)
def test_owners_that_do_not_fit(change, words):
    words_in = dict(zip(("x", "y", "owner", "test"), owned(), strict=True)) | change
    with pytest.raises(InputError, match=words):
        Federation.from_owners(**words_in)


def test_a_sample_that_is_not_finite_is_found_with_its_owner():
    x, y, owner, test = owned()
    x[17, 1] = np.nan
    with pytest.raises(InputError, match=f"sample 17 .client '{owner[17]}'"):
        Federation.from_owners(x, y, owner, test)


def test_a_read_only_array_of_one_client_is_copied():
    """Its base may be written to elsewhere, and the federation must not change under its hash."""
    base = np.arange(24, dtype=np.float32).reshape(12, 2)
    x = base.view()
    x.flags.writeable = False
    fed = Federation.from_arrays([(x, np.arange(12) % 2)])
    before = fed.hash
    base[:] = 0
    assert not np.shares_memory(fed.x, base)
    assert dataclasses.replace(fed).hash == before


@pytest.mark.parametrize(("mode", "copied"), [("r", False), ("r+", True), ("c", True)])
def test_a_single_clients_map_is_copied_unless_it_is_read_only(tmp_path, mode, copied):
    np.save(tmp_path / "x.npy", np.arange(24, dtype=np.float32).reshape(12, 2))
    x = np.load(tmp_path / "x.npy", mmap_mode=mode)
    view = x[2:]
    view.flags.writeable = False
    fed = Federation.from_arrays([(view, np.arange(10) % 2)])
    assert np.shares_memory(fed.x, x) == (not copied)


def test_float_targets_of_several_labels_are_refused_with_the_way_out():
    x, several, one_hot = np.ones((4, 2)), np.array([[1.0, 1], [0, 1], [1, 0], [0, 0]]), np.eye(2)[[0, 1, 0, 1]]
    with pytest.raises(InputError, match=r"Give task='multilabel' \(--task multilabel\); for measurements"):
        Federation.from_arrays([(x, several)])
    with pytest.raises(
        InputError, match=r"of one-hot rows y\.argmax\(1\)\), for several labels per sample task='multilabel'"
    ):
        Federation.from_arrays([(x, one_hot)])
    with pytest.raises(InputError, match=r"task='classification' \(--task classification\) or labels of an integer"):
        Federation.from_arrays([(x, several[:, 0])])
    several[2, 1] = np.nan
    with pytest.raises(InputError, match=r"NaN among the labels of the task multilabel\. Write -1 for a label"):
        Federation.from_arrays([(x, several)], task="multilabel")
