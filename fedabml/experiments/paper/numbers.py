"""The numbers of the paper (arXiv 2307.02222): what ours are held against. Accuracies are in percent."""

from __future__ import annotations

# What the paper calls the systems, by the names they have here.
SYSTEM_NAMES = {
    "local": "Local only",
    "fedavg": "FedAvg",
    "fedavg-ft": "FedAvg+FT",
    "fedprox": "FedProx",
    "fedprox-ft": "FedProx+FT",
    "scaffold": "SCAFFOLD",
    "scaffold-ft": "SCAFFOLD+FT",
    "fedrep": "FedRep",
    "fedbabu": "FedBABU",
    "fedpop": "FedPop",
    "perfedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "ditto": "Ditto",
    "pfedbayes": "pFedBayes",
    "fedabml": "FedABML",
    "apfl": "APFL",  # the last three are not the paper's
    "fedpa": "FedPA",
    "fola": "FOLA",
}

LABELS = "+labels"  # after the name of a rival that also has the label level
SPARSE = "+sparse"  # after the name of a system whose label level is sparse
LEVELS = (LABELS, SPARSE)

# Table 1, by system, in the order of its columns. The paper has no FedRep, FedBABU and FedPop on FashionMNIST, whose
# model has no body. SCAFFOLD+FT on CIFAR-100 repeats its CIFAR-10 cells: probably a slip.
TABLE1_COLUMNS = ("cifar10-2", "cifar10-5", "cifar100-5", "cifar100-20", "emnist", "fashionmnist")
TABLE1: dict[str, tuple[float | None, ...]] = {
    "local": (80.31, 57.08, 73.23, 40.01, 90.88, 95.52),
    "fedavg": (41.29, 52.64, 18.10, 36.79, 57.63, 81.10),
    "fedavg-ft": (84.38, 72.45, 82.30, 62.83, 95.38, 96.50),
    "fedprox": (41.13, 52.00, 17.81, 33.25, 57.59, 81.06),
    "fedprox-ft": (83.96, 71.88, 81.77, 62.25, 95.24, 96.42),
    "scaffold": (29.94, 40.08, 8.28, 28.13, 54.11, 80.86),
    "scaffold-ft": (73.21, 59.85, 73.21, 59.85, 88.66, 94.38),
    "fedrep": (77.67, 59.31, 71.48, 44.30, 95.51, None),
    "fedbabu": (83.35, 70.36, 80.59, 61.10, 91.82, None),
    "fedpop": (81.64, 64.99, 76.26, 50.95, 95.85, None),
    "perfedavg": (80.39, 66.25, 76.93, 55.31, 94.70, 96.19),
    "pfedme": (82.09, 68.11, 78.07, 55.46, 94.45, 96.44),
    "ditto": (83.25, 72.57, 82.94, 63.46, 94.07, 96.39),
    "pfedbayes": (84.96, 68.74, 81.16, 60.91, 94.61, 95.88),
    "fedabml": (84.83, 75.34, 83.17, 64.80, 95.95, 96.57),
}

# Table 2: new clients on CIFAR-10 by the epochs of fine-tuning.
EPOCHS = (0, 1, 2, 3, 4, 5, 8, 10)
TABLE2: dict[str, dict[str, tuple[float, ...]]] = {
    "cifar10-2": {
        "fedavg-ft": (19.18, 75.19, 75.71, 76.42, 76.98, 77.37, 78.11, 78.45),
        "fedprox-ft": (19.00, 74.77, 75.25, 75.94, 76.52, 76.94, 77.67, 78.01),
        "perfedavg": (18.00, 71.29, 72.13, 73.89, 75.22, 76.24, 78.61, 80.08),
        "pfedme": (14.42, 71.99, 71.81, 71.54, 71.68, 72.14, 72.14, 72.33),
        "pfedbayes": (16.95, 67.25, 67.60, 68.46, 68.93, 68.53, 69.40, 69.09),
        "fedabml": (16.09, 77.12, 79.61, 80.65, 81.64, 81.75, 83.05, 83.23),
    },
    "cifar10-5": {
        "fedavg-ft": (25.54, 60.01, 60.41, 60.65, 60.87, 60.48, 61.51, 61.63),
        "fedprox-ft": (24.28, 59.04, 59.32, 59.53, 59.73, 59.50, 60.62, 60.52),
        "perfedavg": (19.82, 48.08, 51.49, 52.69, 54.05, 54.90, 57.81, 58.71),
        "pfedme": (20.90, 54.81, 55.04, 55.33, 55.46, 54.86, 55.31, 55.48),
        "pfedbayes": (16.99, 45.71, 48.28, 47.99, 48.48, 47.96, 48.77, 48.58),
        "fedabml": (29.52, 62.02, 62.79, 63.76, 64.12, 64.50, 65.40, 66.11),
    },
}


def table1(algorithm: str, column: str) -> float | None:
    """Return a cell of Table 1; None where the paper has none. On CIFAR-100 the paper's network is a ResNet-18."""
    row, column = TABLE1.get(algorithm.removesuffix("-plain")), column.removesuffix("-resnet")
    return row[TABLE1_COLUMNS.index(column)] if row and column in TABLE1_COLUMNS else None


def table2(algorithm: str, column: str) -> tuple[float, ...] | None:
    """Return a line of Table 2; None where the paper has none."""
    return TABLE2.get(column, {}).get(algorithm.removesuffix("-plain"))


def name(algorithm: str, protocol: str = "paper") -> str:
    """Return the name of a row: under `tuned`, FedABML has the label level and the paper's own model is `-plain`."""
    if algorithm == "fedabml-plain":
        return "FedABML, no label level"
    if algorithm == "fedabml" and protocol == "tuned":
        return "FedABML + label level"
    if algorithm.endswith(SPARSE):
        return f"{SYSTEM_NAMES[algorithm.removesuffix(SPARSE)]} + sparse label level"
    if algorithm.endswith(LABELS):
        return f"{SYSTEM_NAMES[algorithm.removesuffix(LABELS)]} + label level"
    return SYSTEM_NAMES.get(algorithm, algorithm)
