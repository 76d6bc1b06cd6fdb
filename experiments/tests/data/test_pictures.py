"""Trees of pictures, EyePACS and SVHN."""

import io
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from sparsedp.errors import DataError
from sparsedp_experiments.data import eyepacs, image_folder, load, svhn
from sparsedp_experiments.data.own_files import decode, public_share
from sparsedp_experiments.data.retinopathy import read_grades


def picture(colour=(10, 20, 30), size=(8, 8), kind="PNG"):
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, kind)
    return stream.getvalue()


def write(root, name, content):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_a_divided_tree_keeps_its_sides_and_classes(tmp_path):
    for side, count in (("train", 3), ("test", 2)):
        for label, shade in (("ham", 50), ("spam", 200)):
            for i in range(count):
                write(tmp_path, f"{side}/{label}/{i}.png", picture((shade, i, 0)))
    bundle = image_folder(tmp_path, size=8)
    assert bundle.classes == ("ham", "spam")
    assert (len(bundle.train), len(bundle.test)) == (6, 4)
    assert torch.equal(
        (bundle.train.inputs[:, 0, 0, 0] * 255).round(), torch.tensor([50.0, 200.0])[bundle.train.targets]
    )


def test_an_undivided_tree_is_split_by_a_public_hash_of_names_or_units(tmp_path):
    for label in ("a", "b"):
        for i in range(30):
            write(tmp_path, f"{label}/{i // 2}_{i}.png", picture((i, 0, 0), (4, 4)))
    by_name = image_folder(tmp_path, size=4, channels=1)
    assert by_name.input_shape == (1, 4, 4)
    expected = sum(public_share(f"{label}/{i // 2}_{i}.png") < 0.2 for label in "ab" for i in range(30))
    assert len(by_name.test) == expected
    by_unit = image_folder(tmp_path, size=4, unit_of=lambda name: int(name.split("/")[1].split("_")[0]))
    assert by_unit.unit == "unit"
    assert not set(by_unit.train.units.tolist()) & set(by_unit.test.units.tolist())


def test_a_changed_picture_is_decoded_again(tmp_path):
    for side in ("train", "test"):
        write(tmp_path, f"{side}/a/0.png", picture((1, 1, 1)))
    assert (image_folder(tmp_path, size=8).train.inputs * 255).max().round() == 1
    write(tmp_path, "train/a/0.png", picture((250, 250, 250)))
    assert (image_folder(tmp_path, size=8).train.inputs * 255).max().round() == 250


def test_other_sizes_are_cropped_to_the_centre_and_resized():
    wide = Image.new("RGB", (40, 20), (0, 0, 0))
    wide.paste((255, 255, 255), (10, 0, 30, 20))
    stream = io.BytesIO()
    wide.save(stream, "PNG")
    array = decode(stream.getvalue(), "wide", size=10, channels=3)
    assert array.shape == (3, 10, 10)
    assert array.min() == 255


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.txt": b"x"}, "no pictures"),
        ({"top.png": picture()}, "does not fit"),
        ({"train/a/0.png": picture(), "extra/a/1.png": picture()}, "extra does not fit"),
        ({"train/a/0.png": picture()}, "one side of the split"),
        ({"train/a/0.png": picture()[:40], "test/a/1.png": picture()}, "cannot be decoded"),
    ],
)
def test_trees_that_do_not_fit_are_refused(tmp_path, files, message):
    root = tmp_path / "tree"
    for name, content in files.items():
        write(root, name, content)
    with pytest.raises(DataError, match=message):
        image_folder(root, size=8)


def test_a_missing_tree_and_a_wrong_number_of_channels_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        image_folder(tmp_path / "nowhere", size=8)
    with pytest.raises(DataError, match="expected 1"):
        image_folder(tmp_path, size=8, channels=2)


def write_eyepacs(root, grades, pictures=None, archive=True):
    root.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{image},{grade}\n" for image, grade in grades.items())
    (root / "trainLabels.csv").write_text("image,level\n" + lines)
    natural = "".join(f"{image},{grade}\n" for image, grade in list(grades.items())[::2])
    (root / "naturalLabels.csv").write_text("image,level\n" + natural)
    names = grades if pictures is None else pictures
    if archive:
        with zipfile.ZipFile(root / "train.zip", "w") as file:
            for image in names:
                file.writestr(
                    f"train/{image}.jpeg", picture((int(image.split("_")[0]) % 256, 0, 0), (64, 64), "JPEG")
                )
    else:
        for image in names:
            write(
                root, f"train/{image}.jpeg", picture((int(image.split("_")[0]) % 256, 0, 0), (64, 64), "JPEG")
            )


def some_grades(patients=40):
    return {
        f"{10 * p}_{eye}": (p + (eye == "left")) % 5 for p in range(patients) for eye in ("left", "right")
    }


@pytest.mark.parametrize("archive", [True, False])
def test_eyes_keep_their_grade_and_go_with_their_patient(tmp_path, archive):
    grades = some_grades()
    write_eyepacs(tmp_path / "eyepacs", grades, archive=archive)
    bundle = eyepacs(tmp_path)
    assert bundle.unit == "patient"
    assert len(bundle.train) + len(bundle.test) == len(grades)
    assert len(bundle.test) == 2 * bundle.test.unit_count > 0
    for split in (bundle.train, bundle.test):
        red = (split.inputs[:, 0].mean(dim=(1, 2)) * 255).round()
        assert (red - split.units % 256).abs().max() <= 2
        for patient in split.units.unique().tolist():
            expected = sorted(int(grades[f"{patient}_{eye}"] > 0) for eye in ("left", "right"))
            assert sorted(split.targets[split.units == patient].tolist()) == expected


def test_natural_prevalence_uses_its_own_list(tmp_path):
    write_eyepacs(tmp_path, some_grades())
    natural = eyepacs(tmp_path, prevalence="natural")
    assert len(natural.train) + len(natural.test) == 40
    whole = eyepacs(tmp_path)
    assert set(natural.test.units.tolist()) <= set(whole.test.units.tolist())
    with pytest.raises(DataError, match="expected one of all, natural"):
        eyepacs(tmp_path, prevalence="some")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("image,level\n1_left,5\n", "line 2: got level '5', expected a grade from 0 to 4"),
        ("image,level\n1_left,\n", "got level ''"),
        ("image,level\n1_left\n", "got level None"),
        ("image,level\n1_left,01\n", "got level '01'"),
        ("image,level\n1_left,0\n1_left,1\n", "line 3: image '1_left' is listed twice"),
        ("image,level\none_left,0\n", "expected <number>_left"),
        ("picture,grade\n1_left,0\n", "expected image and level"),
        ("image,level\n", "no images are listed"),
    ],
)
def test_unknown_grades_and_images_are_named_with_their_line(tmp_path, content, message):
    path = tmp_path / "trainLabels.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_grades(path)
    assert "trainLabels.csv" in str(caught.value) or "eyepacs" in str(caught.value)


def test_a_labelled_eye_without_a_picture_is_named(tmp_path):
    grades = some_grades(5)
    write_eyepacs(tmp_path, grades, pictures=list(grades)[:-1])
    with pytest.raises(
        DataError, match=r"no picture for 1 of the 10 images in trainLabels\.csv, the first 40_right"
    ):
        eyepacs(tmp_path)


def test_a_damaged_zip_is_named(tmp_path):
    write_eyepacs(tmp_path, some_grades(5))
    archive = tmp_path / "train.zip"
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(DataError, match=r"train\.zip: cannot be opened as a zip"):
        eyepacs(tmp_path)


def write_svhn(path, rows, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (32, 32, 3, rows), dtype=np.uint8)
    labels = (np.arange(rows) % 10 + 1).astype(np.uint8).reshape(-1, 1)
    savemat(path, {"X": images, "y": labels}, do_compression=True)
    return images


def test_svhn_turns_the_label_ten_into_the_digit_zero(tmp_path):
    images = write_svhn(tmp_path / "train_32x32.mat", 12)
    write_svhn(tmp_path / "test_32x32.mat", 5)
    bundle = svhn(tmp_path)
    assert bundle.train.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    torch.testing.assert_close(
        bundle.train.inputs[3], torch.from_numpy(images[..., 3].transpose(2, 0, 1)) / 255
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "no variables X and y"),
        (
            {"X": np.zeros((2, 2, 3, 2), np.uint8), "y": np.ones(2)},
            r"expected bytes of shape \(32, 32, 3, N\)",
        ),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([1, 11])}, "one label from 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([1, 2, 3])}, "one label from 1 to 10"),
    ],
)
def test_wrong_matlab_files_are_named(tmp_path, content, message):
    savemat(tmp_path / "train_32x32.mat", content)
    write_svhn(tmp_path / "test_32x32.mat", 2)
    with pytest.raises(DataError, match=message) as caught:
        svhn(tmp_path)
    assert "train_32x32.mat" in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[: len(raw) // 2], lambda raw: raw[:100], lambda raw: b"", lambda raw: b"x" * 300],
)
def test_a_truncated_matlab_file_is_named(tmp_path, damage):
    write_svhn(tmp_path / "test_32x32.mat", 2)
    write_svhn(tmp_path / "train_32x32.mat", 9)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"train_32x32.mat: "):
        svhn(tmp_path)


@pytest.mark.data
def test_the_real_eye_labels_have_the_stated_counts(real_data):
    if not (real_data / "eyepacs").is_dir():
        pytest.skip("EyePACS is not in SPARSEDP_DATA")
    whole = read_grades(real_data / "eyepacs" / "trainLabels.csv")
    natural = read_grades(real_data / "eyepacs" / "naturalLabels.csv")
    assert len(whole) == 16_144
    assert len(natural) == 9_292
    assert sum(grade > 0 for grade in natural.values()) == 2_464
    assert natural.items() <= whole.items()


@pytest.mark.nightly
@pytest.mark.data
def test_no_real_patient_is_on_both_sides(real_data):
    if not (real_data / "eyepacs").is_dir():
        pytest.skip("EyePACS is not in SPARSEDP_DATA")
    bundle = load("eyepacs-natural", real_data)
    assert not set(bundle.train.units.tolist()) & set(bundle.test.units.tolist())
    assert 0.17 < bundle.test.unit_count / (bundle.test.unit_count + bundle.train.unit_count) < 0.23
    for split in (bundle.train, bundle.test):
        assert 0.24 < split.targets.float().mean() < 0.31
