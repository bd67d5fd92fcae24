"""Files of tables as frames: workbooks, and what is refused."""

from __future__ import annotations

import builtins
import zipfile

import pytest

from fedabml.data import read_table
from fedabml.data.frames import read_frame
from fedabml.errors import InputError

pd = pytest.importorskip("pandas")
pytest.importorskip("openpyxl")


def frame(n=12):
    return pd.DataFrame({"site": ["a", "b"] * (n // 2), "x": [i / 4 for i in range(n)], "y": ["no", "yes", "no"] * 4})


def test_a_workbook_is_read_like_its_csv(tmp_path):
    frame().to_excel(tmp_path / "t.xlsx", index=False)
    frame().to_csv(tmp_path / "t.csv", index=False)
    book, text = (read_table(tmp_path / f"t.{kind}", client="site", target="y") for kind in ("xlsx", "csv"))
    assert book.hash == text.hash and book.recipe == text.recipe and book.dataset == "t"


def test_dates_of_a_workbook_are_dates(tmp_path):
    days = pd.date_range("2024-01-01", periods=12)
    frame().assign(day=days).to_excel(tmp_path / "t.xlsx", index=False)
    frame().assign(day=days).to_csv(tmp_path / "t.csv", index=False)
    options = {"client": "site", "target": "y", "dates": ["day"]}
    book, text = (read_table(tmp_path / f"t.{kind}", **options) for kind in ("xlsx", "csv"))
    assert book.hash == text.hash and book.recipe == text.recipe


def test_several_sheets_are_refused_by_name(tmp_path):
    with pd.ExcelWriter(tmp_path / "t.xlsx") as book:
        frame().to_excel(book, sheet_name="2023", index=False)
        frame().to_excel(book, sheet_name="2024", index=False)
    with pytest.raises(InputError, match=r"t\.xlsx has 2 sheets \('2023', '2024'\).*as CSV"):
        read_frame(tmp_path / "t.xlsx")


def test_without_openpyxl_the_way_out_is_named(tmp_path, monkeypatch):
    frame().to_excel(tmp_path / "t.xlsx", index=False)
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("openpyxl"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(InputError, match=r"t\.xlsx: reading \.xlsx needs openpyxl.*fedabml\[excel\], or save.*CSV"):
        read_frame(tmp_path / "t.xlsx")


def test_a_workbook_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fedabml.files.limits.SMALL", 1 << 20)
    with zipfile.ZipFile(tmp_path / "t.xlsx", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/sheet.xml", bytes(4 << 20))
    with pytest.raises(InputError, match=r"t\.xlsx"):
        read_frame(tmp_path / "t.xlsx")


@pytest.mark.parametrize("kind", ["xls", "xlsm", "ods"])
def test_other_workbooks_have_a_way_out(tmp_path, kind):
    (tmp_path / f"t.{kind}").write_bytes(b"")
    with pytest.raises(InputError, match="Save its sheet as CSV"):
        read_frame(tmp_path / f"t.{kind}")


def test_words_keep_their_form_in_a_long_file(tmp_path):
    """Read in parts, the first of which has numbers alone, 01 would become 1."""
    text = "ward,x\n" + "01,0.123456789\n" * 300_000 + "A1,0.5\n" * 10
    (tmp_path / "t.csv").write_text(text)
    assert set(read_frame(tmp_path / "t.csv").ward) == {"01", "A1"}
