"""Progress in terminals and notebooks: one base, bars where they can be redrawn, lines elsewhere."""

import io

import pytest
from rich.console import Console

import fedabml
from fedabml.runs import progress
from fedabml.runs.progress import RunProgress, shows_bars

NOTEBOOK = """
import numpy as np, fedabml
rng = np.random.default_rng(0)
pairs = [(rng.normal(size=(8, 3)).astype(np.float32), np.arange(8) % 2) for _ in range(3)]
fed = fedabml.Federation.from_arrays(pairs, pairs, names=["a", "<script>alert(1)</script>", "c"])
quick = {"rounds": 3, "participation": 1.0, "epochs": 1, "device": "cpu"}
run = fedabml.train(fed, "mlr", fedabml.FedAvg(personal_epochs=1), **quick, progress=PROGRESS)
run
"""


def test_a_terminal_shows_a_bar_and_a_file_shows_lines(monkeypatch):
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=120)
    assert shows_bars(terminal) and not shows_bars(Console(file=file, force_terminal=False))
    monkeypatch.setattr(progress, "console", lambda stderr=False: terminal)
    with RunProgress() as board:
        board.open_bar(3, ("loss {task.fields[loss]}",), loss="–")
        board.update_bar(completed=3, loss="0.1234")
    assert "training" in file.getvalue() and "0.1234" in file.getvalue()


def executed(shown):
    """The outputs of a notebook's only cell, run by a kernel, and the states of its widgets."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel"), pytest.importorskip("ipywidgets")
    cell = nbformat.v4.new_code_cell(NOTEBOOK.replace("PROGRESS", str(shown)))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute()
    return notebook.cells[0].outputs, client.widget_state


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of the kernel's own libraries
def test_a_notebook_shows_a_bar_and_the_run_as_a_table():
    outputs, widgets = executed(True)
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" in kinds, "a bar is a widget"
    drawn = str([state.get("outputs") for state in widgets.values()])
    assert "3/3" in drawn and "loss" in drawn
    assert "training" in drawn and "scoring" not in drawn, "the last frame is that of the end, not an earlier one"
    html = outputs[-1]["data"]["text/html"]
    assert html.startswith("<div><strong>Run</strong>") and "&lt;script&gt;" in html and "<script" not in html


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of the kernel's own libraries
def test_a_notebook_is_silent_unless_progress_is_asked_for():
    outputs, widgets = executed(False)
    assert [output["output_type"] for output in outputs if output["output_type"] != "stream"] == ["execute_result"]
    assert not widgets


def test_progress_of_train_is_off_by_default(capsys):
    fed = fedabml.federate(fedabml.load("digits-few"), clients=10, classes_per_client=5)
    fedabml.train(fed, "mlr", fedabml.FedAvg(personal_epochs=1), rounds=1, participation=0.2, epochs=1, device="cpu")
    assert capsys.readouterr().out == ""
