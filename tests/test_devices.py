import pytest

from isobatch import Device, DeviceError
from isobatch.devices import resolve_devices

CPU = Device("cpu")
GPUS = [Device("gpu", 0), Device("gpu", 1)]


@pytest.mark.parametrize(
    ("spelling", "printed"),
    [
        ("cpu", "cpu:0"),
        ("/cpu:0", "cpu:0"),
        ("CPU:3", "cpu:3"),
        ("cuda", "gpu:0"),
        ("cuda:1", "gpu:1"),
        ("/gpu:1", "gpu:1"),
        ("/device:GPU:2", "gpu:2"),
        ("/physical_device:GPU:0", "gpu:0"),
        ("/job:localhost/replica:0/task:0/device:CPU:7", "cpu:7"),
        ("mps", "mps:0"),
        ("xpu:1", "xpu:1"),
        (Device("gpu", 4), "gpu:4"),
    ],
)
def test_any_usual_spelling_is_accepted_and_one_is_printed(spelling, printed):
    assert str(Device.parse(spelling)) == printed


def test_objects_of_the_frameworks_are_devices():
    import torch

    assert Device.parse(torch.device("cuda", 1)) == Device("gpu", 1)
    assert Device.parse(torch.device("cpu")) == CPU


@pytest.mark.parametrize("spelling", ["", "gpu:x", "gpu:-1", "gpu 1", 1.5, None, "a/b", "cpu:0:1"])
def test_nonsense_is_a_device_error_that_shows_it(spelling):
    with pytest.raises(DeviceError, match="Expected a device such as"):
        Device.parse(spelling)


@pytest.mark.parametrize(
    ("request_", "visible", "expected"),
    [
        (None, [CPU], "cpu:0"),
        (None, [*GPUS, CPU], "gpu:0 gpu:1"),
        (3, [CPU], "cpu:0 cpu:1 cpu:2"),
        (2, [*GPUS, CPU], "gpu:0 gpu:1"),
        (1, [*GPUS, CPU], "gpu:0"),
        ("cuda:1", [*GPUS, CPU], "gpu:1"),
        ([1, 0], [*GPUS, CPU], "gpu:1 gpu:0"),
        ([0, 0], [*GPUS, CPU], "gpu:0 gpu:0"),
        ([0, 2], [CPU], "cpu:0 cpu:2"),
        (["cpu:0", "cpu:5"], [*GPUS, CPU], "cpu:0 cpu:5"),
        (("cpu", "gpu:1"), [*GPUS, CPU], "cpu:0 gpu:1"),
    ],
)
def test_requests(request_, visible, expected):
    assert " ".join(map(str, resolve_devices(request_, visible))) == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (3, r"devices=3: gpu:2 absent. Found: gpu:0, gpu:1, cpu:0"),
        (["gpu:7"], r"gpu:7 absent. Found: gpu:0, gpu:1, cpu:0"),
        ([Device("cpu"), Device("gpu", 7)], r"got devices=\['cpu:0', 'gpu:7'\]: gpu:7 absent"),
        ("tpu:0", "tpu:0 absent"),
        (0, "1 or more devices, got devices=0"),
        (-2, "1 or more devices"),
        ([], "at least one device"),
        (True, "a device or its number, got True"),
        ([True], "a device or its number, got True"),
        ([-1], "0 or more, got -1"),
        (2.0, "got 2.0"),
        ({"gpu": 1}, "Expected a device such as"),
    ],
)
def test_absent_and_impossible_devices_say_what_was_found(request_, message):
    with pytest.raises(DeviceError, match=message):
        resolve_devices(request_, [*GPUS, CPU])
