"""Folders of images: what is read is what Pillow decodes, and what cannot be read is named."""

import struct
import zlib

import numpy as np
import pytest
from typer.testing import CliRunner

import fedabml
from fedabml.cli import app
from fedabml.data import images
from fedabml.data.images import ImageRecipe
from fedabml.errors import InputError
from tests.cli.command import run as command

Image = pytest.importorskip("PIL.Image")
CLASSES = ("cat", "dog")


def picture(seed, size=(6, 5), channels=3):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, channels)).astype(np.uint8)
    return pixels[:, :, 0] if channels == 1 else pixels


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path):
    """Two clients with test images, one without; PNG loses nothing, so the pixels are known."""
    seed = 0
    for client, splits in (("site A", ("train/", "test/")), ("site B", ("train/", "test/")), ("site C", ("",))):
        for split in splits:
            for label in CLASSES:
                for i in range(3):
                    save(tmp_path / "sites" / client / f"{split}{label}" / f"{i}.png", picture(seed))
                    seed += 1
    return tmp_path / "sites"


def test_every_pixel_class_and_split_is_that_of_the_files(folder):
    fed = fedabml.Federation.from_folder(folder)
    assert fed.names == ("site A", "site B", "site C") and fed.classes == 2 and fed.images.class_names == CLASSES
    assert fed.x.dtype == np.uint8 and fed.x.shape == (30, 3, 6, 5)
    assert fed.train.counts.tolist() == [6, 6, 6] and fed.test.counts.tolist() == [6, 6, 0]
    for client, path in ((0, "site A/train"), (1, "site B/train"), (2, "site C")):
        rows = fed.train[client]
        assert fed.y[rows].tolist() == [0, 0, 0, 1, 1, 1]
        pixels = [np.asarray(Image.open(file)) for file in sorted((folder / path).glob("*/*.png"))]
        assert np.array_equal(fed.x[rows], np.stack(pixels).transpose(0, 3, 1, 2))


def test_grey_palette_and_turned_images_are_read_as_they_are_shown(tmp_path):
    grey, index = picture(0, channels=1), picture(1, channels=1) % 3
    save(tmp_path / "a" / "x" / "0.png", grey)
    recipe = ImageRecipe(CLASSES, "L", 6, 5)
    assert np.array_equal(recipe.read([tmp_path / "a" / "x" / "0.png"])[0, 0], grey)
    palette = Image.fromarray(index).convert("P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255] + [0] * 759)
    palette.putdata(index.reshape(-1).tolist())
    palette.save(tmp_path / "p.png")
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)[index]
    assert np.array_equal(ImageRecipe(CLASSES, "RGB", 6, 5).read([tmp_path / "p.png"])[0].transpose(1, 2, 0), colours)
    exif = Image.Exif()
    exif[274] = 6  # a camera that was held upright: width and height change places
    Image.fromarray(picture(2)).save(tmp_path / "turned.png", exif=exif)
    turned = ImageRecipe(CLASSES, "RGB", 5, 6).read([tmp_path / "turned.png"])[0]
    assert np.array_equal(turned.transpose(1, 2, 0), np.rot90(picture(2), -1))


def test_images_of_other_sizes_are_resized_only_when_that_is_asked_for(folder):
    save(folder / "site C" / "dog" / "large.png", picture(99, (12, 10)))
    with pytest.raises(InputError, match=r"large.png' has 10×12 pixels, but other images have 5×6.*--image-size 64"):
        fedabml.Federation.from_folder(folder)
    fed = fedabml.Federation.from_folder(folder, image_size=4)
    assert fed.x.shape == (31, 3, 4, 4) and fed.images.resized
    expected = Image.open(folder / "site C" / "dog" / "large.png").resize((4, 4), Image.Resampling.BILINEAR)
    assert np.array_equal(fed.x[fed.train[2][-1]].transpose(1, 2, 0), np.asarray(expected))


def png(width, height):
    """A PNG that claims a size and holds hardly a pixel."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("cat/bad.png", b"not an image", "bad.png' is no PNG or JPEG image, or is damaged"),
        ("cat/bad.jpg", b"", "bad.jpg' is no PNG or JPEG image"),
        ("cat/short.png", png(5, 6)[:50], "short.png' is no PNG or JPEG image, or is damaged"),
        ("cat/bomb.png", png(8000, 8000), r"bomb.png' claims 64,000,000 pixels; at most 50,000,000"),
        ("cat/bomb.png", png(12000, 12000), "bomb.png' claims more than 50,000,000 pixels"),
        ("cat/bomb.png", png(60000, 60000), "bomb.png' claims more than 50,000,000 pixels"),
        ("cat/notes.txt", b"words", "notes.txt' is neither .png nor .jpg"),
        ("loose.png", b"", "loose.png' is in no folder of a class"),
        ("cat/deep/1.png", b"", "deep' is a folder inside the folder of a class"),
        ("test/cat/1.png", b"", "cat' stands beside train and test"),
    ],
)
def test_what_cannot_be_read_is_named(folder, name, content, says):
    path = folder / "site C" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        fedabml.Federation.from_folder(folder)


def test_modes_are_never_changed_silently(folder, tmp_path):
    file = save(folder / "site C" / "dog" / "grey.png", picture(1, channels=1))
    with pytest.raises(InputError, match=r"grey.png' is of mode L, but other images are RGB"):
        fedabml.Federation.from_folder(folder)
    save(file, picture(1, channels=1).astype(np.uint16) * 100)
    with pytest.raises(InputError, match=r"grey.png' is of mode I;16 with 16 bits"):
        fedabml.Federation.from_folder(folder)
    Image.fromarray(picture(1)).convert("CMYK").save(file.with_suffix(".jpg"))
    file.unlink()
    with pytest.raises(InputError, match=r"grey.jpg' is of mode CMYK"):
        fedabml.Federation.from_folder(folder)


def test_hidden_files_are_left_alone_and_missing_images_are_named(folder, tmp_path):
    (folder / "site C" / "dog" / ".DS_Store").write_bytes(b"x")
    (folder / "site C" / "dog" / "Thumbs.db").write_bytes(b"x")
    assert fedabml.Federation.from_folder(folder).clients == 3
    (folder / "site D" / "dog").mkdir(parents=True)
    with pytest.raises(InputError, match="site D' holds no image"):
        fedabml.Federation.from_folder(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no .npz file.*client/class/image.png"):
        fedabml.Federation.from_folder(tmp_path / "empty")


@pytest.mark.parametrize("place", ["site A/train", "site A/test", "site C"])
def test_a_folder_of_a_class_without_any_image_is_refused(folder, place):
    (folder / place / "dogs").mkdir()
    with pytest.raises(InputError, match=r"dogs' holds no image, and no client has one of the class.*'dog'"):
        fedabml.Federation.from_folder(folder)
    (folder / place / "dogs").rmdir()
    for file in (folder / "site C" / "dog").iterdir():  # other clients have dogs
        file.unlink()
    assert fedabml.Federation.from_folder(folder).classes == 2


def test_one_class_another_task_and_a_stray_size_are_refused(tmp_path, folder):
    for i in range(2):
        save(tmp_path / "one" / "site" / "cat" / f"{i}.png", picture(i))
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "c.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1])
    from_folder = fedabml.Federation.from_folder
    for call, says in (
        (lambda: from_folder(tmp_path / "one"), "All images are of the class 'cat'"),
        (lambda: from_folder(folder, task="regression"), "the task is classification"),
        (lambda: from_folder(folder, image_size=0), "image_size must be a whole number"),
        (lambda: from_folder(folder, image_size=10**6), "at most 4096 pixels"),
        (lambda: from_folder(tmp_path / "npz", image_size=8), "image_size has nothing to resize"),
    ):
        with pytest.raises(InputError, match=says):
            call()


@pytest.mark.parametrize("name", ["labels.csv", "stray.png", "site D.npz"])
def test_what_stands_beside_the_clients_of_a_folder_is_never_left_out(folder, name):
    np.savez(folder.parent / "some.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1])
    (folder.parent / "some.npz").rename(folder / name)
    with pytest.raises(InputError, match=rf"'.*{'site A' if name.endswith('npz') else name}' is no .*elsewhere"):
        fedabml.Federation.from_folder(folder)


def test_what_stands_beside_files_of_clients_is_never_left_out(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1])
    assert fedabml.Federation.from_folder(tmp_path).clients == 1
    np.save(tmp_path / "e.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"e.npy' is no .npz file"):
        fedabml.Federation.from_folder(tmp_path)


def test_documents_and_what_an_inspection_writes_may_stand_beside_clients(tmp_path, folder):
    files = tmp_path / "files"
    files.mkdir()
    np.savez(files / "a.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1])
    for data in (folder, files):
        before = fedabml.Federation.from_folder(data)
        for name in ("README", "README.md", "LICENSE.txt", "notes.md"):
            (data / name).write_text("about these data")
        for _ in range(2):
            command("data", "inspect", "--data", data, "--out", data, "--force")
        again = fedabml.Federation.from_folder(data)
        assert again.names == before.names and np.array_equal(again.x, before.x)
    (files / "site B.txt").write_text("1 2 3")
    with pytest.raises(InputError, match=r"site B.txt' is no .npz file"):
        fedabml.Federation.from_folder(files)


def test_a_class_of_test_images_alone_is_refused(folder):
    (folder / "site B" / "test" / "dog").rename(folder / "site B" / "test" / "Dog")
    with pytest.raises(InputError, match=r"test image of the class 'Dog', of which no client.*Did you mean 'dog'"):
        fedabml.Federation.from_folder(folder)


def test_without_pillow_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install fedabml\[images\]"):
        fedabml.Federation.from_folder(folder)


def test_too_little_memory_is_found_before_anything_is_decoded(folder, monkeypatch):
    monkeypatch.setattr(images, "host_memory", lambda: (1000, 1000))
    monkeypatch.setenv("FEDABML_IMAGE_CACHE", "off")
    with pytest.raises(InputError, match="30 images of 5×6 pixels need 2,700 bytes of memory"):
        fedabml.Federation.from_folder(folder)


def test_a_recipe_is_read_back_and_a_damaged_one_is_refused():
    recipe = ImageRecipe(CLASSES, "RGB", 6, 5, True)
    assert ImageRecipe.from_json(recipe.to_json()) == recipe
    for change in ({"mode": "CMYK"}, {"height": 0}, {"class_names": [1]}, {"width": "5"}):
        with pytest.raises(InputError, match="recipe for images is damaged"):
            ImageRecipe.from_json(recipe.to_json() | change)


@pytest.mark.slow
def test_from_folders_to_predictions_by_file(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words, code=0):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, result.output
        return result.output

    assert "cat:3 dog:3" in run("data", "inspect", folder)
    quick = ("--rounds", 1, "--participation", 1, "--model", "mlr", "--device", "cpu", "--image-size", 4)
    run("train", "--data", folder, *quick, "--out", "run", "-q")
    assert "on 6 test samples" in run("personalize", "run", "--data", folder / "site A", "--out", "p.safetensors")
    run("predict", "p.safetensors", "--data", folder / "site B" / "test", "--out", "p.csv")
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines[0].startswith("row,file,label,p_cat,p_dog") and lines[1].startswith("0,cat/0.png,") and len(lines) == 7
    posterior = fedabml.load_prior("run/shared.safetensors").personalize(folder / "site A")
    assert posterior.predict(folder / "site B" / "test").decode()[0] in CLASSES
    with pytest.raises(InputError, match="leave y out"):
        fedabml.load_prior("run/shared.safetensors").personalize(folder / "site A", [0, 1])
    save(folder / "site C" / "owl" / "1.png", picture(1))
    with pytest.raises(InputError, match="class 'owl', which the prior does not know"):
        posterior.input_spec.images.site(folder / "site C")
    assert fedabml.load_posterior("p.safetensors").input_spec.images == posterior.input_spec.images
