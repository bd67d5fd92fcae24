"""What is printed of a federation tells its sizes and nothing of its data."""

import fedabml


def test_a_federation_prints_sizes_only():
    fed = fedabml.federate(fedabml.load("digits"), clients=4, classes_per_client=5)
    assert repr(fed) == "Federation(digits: 4 clients, 1442 train / 0 val / 355 test, shape (1, 8, 8), 10 classes)"
