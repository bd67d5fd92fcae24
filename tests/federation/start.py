"""Helpers of these tests: sites with data of every kind, and an exchange that carries orders within the process."""

import json

import numpy as np
import pandas as pd

from fedabml.federation import handshake, schema
from fedabml.federation.folders import SiteFolder
from fedabml.federation.messages import Order, new_nonce
from fedabml.federation.settings import Settings, SiteSettings

ID = "0123456789abcdef" * 2
NAMES = ("a", "b", "c")
SECRET = "Zaphod-Xylophone"
SECRET_NUMBER = 7_919_431.0
TABLE = {"target_column": "ill", "id_column": "patient", "date_columns": ["admitted"], "drop_columns": ["note"]}


def frame(number, rows=40):
    """One hospital's table: numbers with gaps, words, dates, an identifier, and free text."""
    draw = np.random.default_rng(number)
    age = draw.normal(55 + 5 * number, 12, rows)
    age[number : number + 2] = np.nan
    return pd.DataFrame(
        {
            "patient": [f"{number}-{i:04d}" for i in range(rows)],
            "age": age,
            "dose": draw.gamma(2.0, 3.0, rows),
            "ward": draw.choice(["north", "south"], rows),
            "admitted": [f"20{20 + i % 4}-0{1 + i % 9}-1{i % 10}" for i in range(rows)],
            "note": [f"free text {number} {i}" for i in range(rows)],
            "ill": np.where(draw.random(rows) < 0.5, "yes", "no"),
        }
    )


def arrays(number, rows=30):
    """One client's .npz: five features and three classes."""
    draw = np.random.default_rng(100 + number)
    x, y = draw.normal(2 * number, 3, (rows, 5)).astype(np.float32), np.arange(rows) % 3
    return {"x_train": x[:-6], "y_train": y[:-6], "x_test": x[-6:], "y_test": y[-6:]}


def write_images(folder, number, each=4):
    """One client's folder of grey images of 8×8 pixels, of two classes."""
    from PIL import Image

    draw = np.random.default_rng(200 + number)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for i in range(each + number):
            pixels = draw.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{i}.png")


def make_site(root, name, data, **options):
    """A site's folder whose site.toml names the data."""
    site = SiteFolder(root / f"site-{name}")
    site.make()
    options = {"federation": ID, "name": name, "server": "localhost:8443", "test_share": 0.2, **options}
    SiteSettings(data=str(data), **options).save(site.settings_file)
    return site


def make_sites(root, kind, **options):
    """Three sites with data of a kind, and the schema that is drafted from the first one."""
    sites = {}
    if kind == "table" and options.get("allow_pooled_sums"):
        options = {"target_column": "ill", **options}
    for number, name in enumerate(NAMES):
        if kind == "table":
            data = root / f"{name}.csv"
            frame(number).to_csv(data, index=False)
        elif kind == "arrays":
            data = root / f"{name}.npz"
            np.savez(data, **arrays(number))
        else:
            data = root / "images" / name
            write_images(data, number)
        sites[name] = make_site(root, name, data, **options)
    drafted = schema.draft(sites["a"].settings.data, **(TABLE if kind == "table" else {}))
    return sites, drafted


def settings(**changes):
    """Settings of a small federation."""
    options = {"model_options": {"hidden": [8]}, "rounds": 2, "epochs": 1, "batch_size": 10, **changes}
    return Settings(federation=ID, name="test", host="localhost", **options)


class Exchange:
    """Carries orders to sites in this process as JSON and tensors, and keeps every reply's text."""

    def __init__(self, sites):
        self.sites, self.kinds, self.texts = sites, [], []

    def __call__(self, kind, facts, tensors, timeout):
        self.kinds.append(kind)
        replies = {}
        for number, (name, site) in enumerate(self.sites.items()):
            order = make_order(kind, name, number, json.loads(json.dumps(facts)), tensors)
            replies[name] = order.reply(**json.loads(json.dumps(handshake.answer(order, site))))
            self.texts.append(json.dumps(replies[name].facts) + replies[name].error)
        return replies


def make_order(kind, name, number=0, facts=None, tensors=None, federation=ID):
    """An order of the start protocol."""
    return Order(kind, federation, "", name, number, 0, 0, new_nonce(), facts=facts or {}, tensors=tensors or {})
