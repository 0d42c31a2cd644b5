"""Readings of the GPUs of this node, from NVML: utilization, memory, power, temperature, clocks, reasons for lower
clocks, memory errors, and faults (Xid).

The library is nvidia-ml-py, with the module pynvml; without it nothing is read. A reading that a device does not
support is None.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from shardwright.config.base import error_text
from shardwright.config.phrase import each, say

# The bits of nvmlDeviceGetCurrentClocksThrottleReasons for a throttled device. Idle devices, and clocks that a user has
# set, have other bits.
_HELD_BACK = {
    0x4: say("power cap"),
    0x8: say("hardware slowdown"),
    0x20: say("software thermal"),
    0x40: say("hardware thermal"),
    0x80: say("power brake"),
}


@dataclass(frozen=True)
class GpuReading:
    """The current reading of one GPU. Shares are from 0 to 1; `xids` are faults since the last reading; `held_back_by`
    are the reasons for clocks that are lower than requested."""

    index: int
    use_share: float | None
    memory_share: float | None
    power_w: float | None
    temperature_c: int | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    held_back_by: tuple[str, ...]
    corrected_errors: int | None
    uncorrected_errors: int | None
    xids: tuple[int, ...]


@dataclass
class GpuReadings:
    """Reads all GPUs that the driver of this node knows. `nvml` is the module pynvml, initialised."""

    nvml: Any
    _events: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Register for events about faults, if the driver supports them."""
        with suppress(self.nvml.NVMLError, AttributeError):
            events = self.nvml.nvmlEventSetCreate()
            for handle in self._handles().values():
                self.nvml.nvmlDeviceRegisterEvents(handle, self.nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def read(self) -> list[GpuReading]:
        """The readings of all GPUs. A value that can't be read is None."""
        xids = self._new_xids()
        return [self._read(index, handle, xids.get(index, ())) for index, handle in self._handles().items()]

    def _handles(self) -> dict[int, Any]:
        """The handles of the GPUs that answer, by number. A GPU that has fallen off the bus does not answer."""
        num_gpus = self._ask("nvmlDeviceGetCount") or 0
        handles = {i: self._ask("nvmlDeviceGetHandleByIndex", i) for i in range(num_gpus)}
        return {i: handle for i, handle in handles.items() if handle is not None}

    def _read(self, index: int, handle: Any, xids: tuple[int, ...]) -> GpuReading:
        nvml = self.nvml
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        utilization = self._ask("nvmlDeviceGetUtilizationRates", handle)
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        volatile = getattr(nvml, "NVML_VOLATILE_ECC", 0)
        corrected, uncorrected = (
            self._ask("nvmlDeviceGetTotalEccErrors", handle, getattr(nvml, name, i), volatile)
            for i, name in enumerate(("NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"))
        )
        return GpuReading(
            index,
            use_share=None if utilization is None else utilization.gpu / 100,
            memory_share=None if memory is None else memory.used / memory.total,
            power_w=None if milliwatts is None else milliwatts / 1e3,
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, getattr(nvml, "NVML_TEMPERATURE_GPU", 0)),
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, getattr(nvml, "NVML_CLOCK_SM", 1)),
            memory_clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, getattr(nvml, "NVML_CLOCK_MEM", 2)),
            held_back_by=tuple(name for bit, name in _HELD_BACK.items() if reasons & bit),
            corrected_errors=corrected,
            uncorrected_errors=uncorrected,
            xids=xids,
        )

    def _ask(self, name: str, *args: Any) -> Any:
        """The result of a function of NVML; None if the driver or the device does not support it."""
        with suppress(self.nvml.NVMLError, AttributeError):
            return getattr(self.nvml, name)(*args)
        return None

    def _new_xids(self) -> dict[int, tuple[int, ...]]:
        """The faults since the last call, by the number of the GPU."""
        xids: dict[int, tuple[int, ...]] = {}
        with suppress(self.nvml.NVMLError, AttributeError):  # without an event the wait raises, which ends the loop
            while self._events is not None:
                event = self.nvml.nvmlEventSetWait_v2(self._events, 0)
                index = self.nvml.nvmlDeviceGetIndex(event.device)
                xids[index] = (*xids.get(index, ()), int(event.eventData))
        return xids


def open_readings(device: torch.device, load: Callable[[str], Any] = import_module) -> tuple[GpuReadings | None, str]:
    """The readings of this node, or None; and a sentence if a GPU exists that can't be read, else ""."""
    if device.type != "cuda":
        return None, ""
    try:
        nvml = load("pynvml")
    except ImportError:
        return None, say("GPUs are not read: nvidia-ml-py is not installed; pip install 'shardwright[gpu]'")
    try:
        nvml.nvmlInit()
        return GpuReadings(nvml), ""
    except nvml.NVMLError as error:
        return None, say("GPUs are not read: the driver's NVML says {reason}", reason=error_text(error))


def gpu_sentences(readings: list[GpuReading]) -> list[str]:
    """A sentence for each GPU that has a fault or uncorrected errors, or is throttled."""
    sentences: list[str] = []
    for gpu in readings:
        parts: list[str] = [say("fault Xid {number}", number=xid) for xid in gpu.xids]
        if gpu.uncorrected_errors:
            parts.append(
                say(
                    "{uncorrected_errors} memory errors that were not corrected",
                    uncorrected_errors=gpu.uncorrected_errors,
                )
            )
        if gpu.held_back_by:
            parts.append(say("held back by {held_back_by}", held_back_by=tuple(gpu.held_back_by)))
        if parts:
            sentences.append(say("GPU {index} of this node: {parts}", index=gpu.index, parts=each(parts)))
    return sentences
