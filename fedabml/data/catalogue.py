"""What is known of every dataset before it is here: its size, its official files, the names of its classes.

`digits` are the 1797 images of the test part of *Optical Recognition of Handwritten Digits* (E. Alpaydin and C. Kaynak,
UCI Machine Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0), as scikit-learn distributes them: 8x8 pixels of
0..16, here times 15, split 4:1 inside every class. `digits-few` has the same images, but every second training image of
a class is a test image. Its clients have so few images that sharing helps. No image that it tests is ever trained on,
whatever the seed of the partition.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Remote:
    """One official file: its name, its md5, and the addresses of the folders that have it."""

    name: str
    md5: str
    bases: tuple[str, ...]  # in the order in which they are tried


@dataclass(frozen=True)
class Source:
    """The facts of a dataset. `train` and `test` count samples, `shape` is that of one image."""

    classes: int
    train: int
    test: int
    shape: tuple[int, ...]
    decoder: str = ""  # a function of the module decode
    files: tuple[Remote, ...] = ()
    class_names: tuple[str, ...] = ()


def class_names(of_data: Sequence[str], dataset: str, classes: int) -> tuple[str, ...]:
    """Return the names that the data give the classes, else those of the built-in dataset, else their numbers."""
    of_dataset = SOURCES[dataset].class_names if dataset in SOURCES else ()
    return tuple(of_data) or (of_dataset if len(of_dataset) == classes else tuple(map(str, range(classes))))


def _idx_files(bases: tuple[str, ...], *md5: str) -> tuple[Remote, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(Remote(f"{name}-ubyte.gz", value, bases) for name, value in zip(names, md5, strict=True))


MNIST = _idx_files(
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
    *("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
    *("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
)
FASHION = _idx_files(
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    *("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
    *("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
)
NIST = ("https://biometrics.nist.gov/cs_links/EMNIST/", "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/")
EMNIST = Remote("gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e", NIST)
TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
CIFAR10 = Remote("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", TORONTO)
CIFAR100 = Remote("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", TORONTO)
SVHN = Remote("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", ("http://ufldl.stanford.edu/housenumbers/",))

DIGITS = tuple(string.digits)
LETTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

EMBEDDED = ("digits", "digits-few")  # inside the package, in one file
SOURCES: Mapping[str, Source] = {
    "digits": Source(10, 1442, 355, (8, 8), class_names=DIGITS),
    "digits-few": Source(10, 723, 1074, (8, 8), class_names=DIGITS),
    "mnist": Source(10, 60000, 10000, (28, 28), "mnist", MNIST, DIGITS),
    "fashionmnist": Source(10, 60000, 10000, (28, 28), "mnist", FASHION, CLOTHES),
    # a tenth of by-class; another tenth has a few samples more or fewer in a split
    "emnist": Source(62, 69821, 11604, (28, 28), "emnist", (EMNIST,), LETTERS),
    "cifar10": Source(10, 50000, 10000, (32, 32, 3), "cifar10", (CIFAR10,), THINGS),
    "cifar100": Source(100, 50000, 10000, (32, 32, 3), "cifar100", (CIFAR100,)),
    # the test split alone: it serves as out-of-distribution data
    "svhn": Source(10, 0, 26032, (32, 32, 3), "svhn", (SVHN,), DIGITS),
}
