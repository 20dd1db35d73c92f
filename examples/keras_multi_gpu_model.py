# ruff: noqa: NPY002
"""The example of the old documentation of `keras.utils.multi_gpu_model`, with eight GPUs or stand-ins for them.

On a machine without eight GPUs: ISOBATCH_VIRTUAL_GPUS=8 python examples/keras_multi_gpu_model.py
It takes some minutes there, most of them for TensorFlow to prepare eight replicas of Xception. Images are smaller and
fewer than in the documentation; what is different otherwise is one import.
"""

import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf
from keras.applications import Xception
from keras.models import load_model

from isobatch_keras import multi_gpu_model

num_samples = 16
height = 71
width = 71
num_classes = 10

# Instantiate the base model (or "template" model).
# We recommend doing this with under a CPU device scope,
# so that the model's weights are hosted on CPU memory.
# Otherwise they may end up hosted on a GPU, which would
# complicate weight sharing.
with tf.device("/cpu:0"):
    model = Xception(weights=None, input_shape=(height, width, 3), classes=num_classes)

# Replicates the model on 8 GPUs.
# This assumes that your machine has 8 available GPUs.
parallel_model = multi_gpu_model(model, gpus=8)
parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")

# Generate dummy data.
x = np.random.random((num_samples, height, width, 3))
y = np.random.random((num_samples, num_classes))

# This `fit` call will be distributed on 8 GPUs.
# Since the batch size is 256, each GPU will process 32 samples.
parallel_model.fit(x, y, epochs=1, batch_size=256)

# Save model via the template model (which shares the same weights):
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "my_model.keras"
    model.save(path)
    print(f"saved {load_model(path).count_params():,} parameters in {path.stat().st_size / 2**20:.0f} MiB")
