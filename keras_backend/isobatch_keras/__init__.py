"""Data parallelism for Keras 3: `keras.utils.multi_gpu_model`, rebuilt."""

from isobatch_keras.backend import BACKEND
from isobatch_keras.devices import stand_in as _stand_in
from isobatch_keras.devices import virtual_devices
from isobatch_keras.multi_gpu import multi_gpu_model
from isobatch_keras.spec import register_layer, to_spec

__all__ = ["BACKEND", "multi_gpu_model", "register_layer", "to_spec", "virtual_devices"]

_stand_in()
