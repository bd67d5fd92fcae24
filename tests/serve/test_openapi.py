"""The example of a posterior's own inputs, for tables with dates and identifiers, images, tokens and plain arrays."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedabml.data import TableRecipe
from fedabml.errors import InputError
from fedabml.gaussian import Point
from fedabml.likelihoods import Categorical
from fedabml.models import build
from fedabml.runs.input_spec import InputSpec
from fedabml.runs.posterior import Posterior
from fedabml.runs.prediction_columns import output_columns
from fedabml.serve.bodies import PARSERS, read_rows
from fedabml.serve.openapi import description, example_body, example_row
from fedabml.vectors import Network

pd = pytest.importorskip("pandas")


def posterior(shape, shift=0.0, dtype="float32", recipe=None):
    likelihood = Categorical(2)
    network = Network(build("mlr", list(shape), 2), 0)
    one = np.ones(())
    spec = InputSpec(network, likelihood, None, shape, np.asarray(shift), one, one * 0, one, dtype, recipe=recipe)
    return Posterior(Point(network.initial), spec, None)


def table():
    frame = pd.DataFrame({"who": ["a"] * 10, "day": [f"2024-{i + 1:02}-15" for i in range(10)]})
    frame["dose, mg"] = np.arange(10.0)
    frame["word"] = ["x", 'quoted "y"'] * 5
    frame["y"] = ["no", "yes"] * 5
    recipe = replace(TableRecipe.fit(frame, "who", "y", "classification", ("no", "yes"), dates=("day",)), id="number")
    return posterior((len(recipe.feature_names),), recipe=recipe)


CASES = {
    "table": table,
    "array": lambda: posterior((3,), [0.123456789, 2.0, -1e-7]),
    "images": lambda: posterior((1, 4, 4), 33.4, "uint8"),
    "volume": lambda: posterior((2, 3, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_example_is_read_in_every_form(case):
    own = CASES[case]()
    spec = own.input_spec
    rows = [PARSERS["application/json"](spec, example_body(spec), 1)]
    columns = output_columns(own.predict_inputs(read_rows(own, rows, True)), spec)
    content = description(own, columns, 7)["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert content["application/json"]["schema"]["properties"]["rows"]["maxItems"] == 7
    assert json.loads(example_body(spec)) == content["application/json"]["example"]
    if "text/csv" in content:
        rows += [PARSERS["text/csv"](spec, content["text/csv"]["example"].encode(), 1)]
        joined = read_rows(own, rows, True).x
        assert (joined[0] == joined[1]).all() and len(joined) == 2
    else:
        with pytest.raises(InputError, match="JSON"):
            PARSERS["text/csv"](spec, b"1,2\n", 1)


def test_a_table_names_its_columns_and_carries_identifiers():
    own = table()
    assert example_row(own.input_spec) == {"dose, mg": 4.5, "word": 'quoted "y"', "day": "2024-07-01"}
    row = example_row(own.input_spec) | {"number": 7.0, "extra": 1}
    rows = PARSERS["application/json"](own.input_spec, json.dumps({"rows": [row]}).encode(), 1)
    assert rows.ids == ["7"] and rows.ignored == ["extra"]
    rows = PARSERS["text/csv"](own.input_spec, b'day,"dose, mg",word,number\n2024-01-31,1,x,007\n', 1)
    assert rows.ids == ["007"] and rows.ignored == []
    wrong = json.dumps({"rows": [row | {"day": "31.1.2024"}]}).encode()
    rows = PARSERS["application/json"](own.input_spec, wrong, 1)
    with pytest.raises(InputError, match=r"row 1.*ISO date"):
        read_rows(own, [rows], True)


@pytest.mark.parametrize("value", [256, -1, 0.5])
def test_pixels_are_whole_numbers_up_to_255(value):
    own = CASES["images"]()
    body = json.dumps({"rows": [[[[value] * 4] * 4]]}).encode()
    with pytest.raises(InputError, match="255"):
        PARSERS["application/json"](own.input_spec, body, 1)


def test_every_operation_says_what_its_replies_mean():
    own = posterior((3,))
    paths = description(own, {"label": ["0"]}, 7)["paths"]
    replies = {path: next(iter(each.values()))["responses"] for path, each in paths.items()}
    assert all(len(reply["description"].split()) > 2 for each in replies.values() for reply in each.values())
    assert "503" in replies["/predict"] and "503" in replies["/ready"]
