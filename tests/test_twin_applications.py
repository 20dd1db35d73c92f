"""Twins of the models of `keras.applications`: one of each family, and all 40 with ISOBATCH_ALL_APPLICATIONS=1."""

import os

import keras
import numpy as np
import pytest

import isobatch
from isobatch.verdict import judge

FAMILIES = [
    *(
        "ConvNeXtTiny",
        "DenseNet121",
        "EfficientNetB0",
        "EfficientNetV2B0",
        "InceptionResNetV2",
        "InceptionV3",
        "MobileNet",
    ),
    *("MobileNetV2", "MobileNetV3Small", "NASNetMobile", "ResNet50", "ResNet50V2", "VGG16", "Xception"),
]
ALL = [name for name in dir(keras.applications) if name[0].isupper()]
SIZES = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}


def application(name):
    """The model with small images and few classes, and statistics, offsets and scales that are not those it starts with."""
    size = SIZES.get(name, 32)
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)
    rng = np.random.default_rng(0)
    for variable in model.variables:
        if "float" in variable.dtype and len(variable.shape) == 1:
            variable.assign(variable.numpy() + rng.uniform(0.0, 0.1, variable.shape))
    return model, rng.uniform(0, 255, (1, size, size, 3))


def test_there_are_40():
    assert len(ALL) == 40
    assert set(FAMILIES) <= set(ALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL if os.environ.get("ISOBATCH_ALL_APPLICATIONS") else FAMILIES)
def test_twin_of_application_agrees(name):
    model, image = application(name)
    verdict = judge(model, isobatch.twin(model), image, precision=None)
    assert verdict.passed, str(verdict)
    keras.backend.clear_session()


@pytest.mark.slow
def test_the_smallest_application_agrees_over_replicas():
    model = keras.applications.MobileNetV3Small(weights=None, input_shape=(32, 32, 3), classes=10)
    verdict = judge(
        model, isobatch.twin(model), np.random.default_rng(0).uniform(0, 255, (3, 32, 32, 3)), replicas=(2,)
    )
    assert verdict.passed, str(verdict)
    assert verdict.closeness.gap < 1e-5
