"""What is wrong with a deployment's options, found before anything is started. Knows neither torch nor Ray."""

from __future__ import annotations

import ctypes
import socket

from msgspec.structs import replace

from kvferry.cluster.config import GroupSpec, ServeConfig
from kvferry.runtime.config import EngineConfig
from kvferry.runtime.errors import InvalidArgument
from kvferry.runtime.model.files import ModelFiles, load_spec
from kvferry.runtime.model.fit import check_draft, check_fit
from kvferry.runtime.model.spec import ModelSpec

RAY_CONNECT_TIMEOUT_S = 5.0


def checked(config: ServeConfig, files: ModelFiles) -> tuple[ServeConfig, ModelSpec]:
    """The options with an absolute path in the draft model's place, and the model. Raises `CallerError`s.

    What only a worker can know (its CPU's operations, its GPU), it says itself, before it reads weights.
    """
    if config.ray_address is None:
        _check_transport(config)
    else:
        _check_ray_address(config.ray_address)
    spec = load_spec(files)
    for group in config.groups():
        check_group(config.engine, spec, group)
    speculation = config.engine.speculation
    if speculation.draft_model is not None:
        draft = check_draft(speculation.draft_model, files, spec)
        engine = replace(config.engine, speculation=replace(speculation, draft_model=draft.path))
        config = replace(config, engine=engine)
    return config, spec


def check_group(engine: EngineConfig, spec: ModelSpec, group: GroupSpec) -> None:
    """Raises `InvalidArgument`."""
    check_fit(engine, spec, group.tp_size, f"{group.role}_tp")


def _check_transport(config: ServeConfig) -> None:
    """All workers will be on this machine."""
    if config.engine.transfer.transport != "nccl":
        return
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver's; without it there is no device, whatever torch was built for
    except OSError:
        raise InvalidArgument(
            "transport", "nccl", "needs GPUs, and this machine has none", "use shm, or gloo between machines"
        ) from None


def _check_ray_address(address: str) -> None:
    """Ray itself would try an address where nobody listens for minutes, and then abort the process."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise InvalidArgument("ray_address", address, "must be HOST:PORT of a Ray head, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=RAY_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        hint = "see `ray status` there, or leave the option out"
        raise InvalidArgument("ray_address", address, f"nobody answers there: {error}", hint) from error
