"""Every error and warning the library raises of its own accord.

Each error is an `IsobatchError` and a builtin, so that `except ValueError` in older code keeps working.
"""

__all__ = [
    "BackendError",
    "BatchSizeError",
    "ClusterError",
    "DataError",
    "DeviceError",
    "DeviceWarning",
    "IsobatchError",
    "LeafTypeError",
    "ModelError",
    "SpecError",
    "StructureError",
]


class IsobatchError(Exception):
    """Base class of every error of this library."""


class BackendError(IsobatchError, ImportError):
    """A framework that was asked for is unknown, not installed or too old."""


class BatchSizeError(IsobatchError, ValueError):
    """The arrays of a batch, or the sizes asked for, do not agree on the number of rows."""


class ClusterError(IsobatchError, RuntimeError):
    """The processes of a cluster cannot meet, differ, or have lost one of them."""


class DataError(IsobatchError, ValueError):
    """A file of data is absent, or its arrays are not as described."""


class DeviceError(IsobatchError, ValueError):
    """A device cannot be understood, or is not on this machine."""


class LeafTypeError(IsobatchError, TypeError):
    """A value can be neither split between replicas nor joined from them."""


class ModelError(IsobatchError, ValueError):
    """A model cannot be made parallel; the message says why and what to do."""


class SpecError(IsobatchError, ValueError):
    """A network's description is broken, or holds or needs what has no word in it."""


class StructureError(IsobatchError, ValueError):
    """The replicas returned outputs that do not fit together."""


class DeviceWarning(UserWarning):
    """Replicas share a device because the machine shows fewer than were asked for."""
