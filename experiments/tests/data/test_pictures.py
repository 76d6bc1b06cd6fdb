"""Trees of pictures, EyePACS and SVHN."""

import io
import zipfile

import pytest
from PIL import Image

from sparsedp.errors import DataError
from sparsedp_experiments.data import eyepacs, load
from sparsedp_experiments.data.retinopathy import read_grades


def picture(colour=(10, 20, 30), size=(8, 8), kind="PNG"):
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, kind)
    return stream.getvalue()


def write(root, name, content):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


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
