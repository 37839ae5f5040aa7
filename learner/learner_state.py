"""A model and its optimizer on the disk: written whole by rank 0, read by any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headway.core.errors import DataError
from headway.learner import lora
from headway.learner.checkpoint import writing
from headway.learner.model import PolicyModel
from headway.learner.sharding import local, own_part, whole

TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")
"""Configuration and tokenizer files of a model folder, which go into every checkpoint beside the weights."""


@torch.no_grad()
def save_learner(
    folder: Path,
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    version: int,
    extra: dict[str, Any],
) -> None:
    """Collective. Writes the learner's part of a checkpoint into `folder`, which exists:

    `model/`, a Hugging Face folder with float32 weights, an adapter added in; `adapter.safetensors`, the adapter if
    there is one; `learner.pt`, all else. `extra` holds numbers, strings, lists and dicts of them; that of rank 0 counts.
    Raises `CheckpointFailed`, on rank 0 only.
    """
    writes = model.ranks.rank == 0
    # Everything is gathered before anything is written: a rank that fails must not leave the others waiting.
    weights, adapter = {}, {}
    for name, weight in model.checkpoint():
        if writes:
            weights[name] = weight.cpu().contiguous()
    if model.adapter_scale is not None:
        adapter = {name: whole(p.detach()).cpu().contiguous() for name, p in model.masters.items()}
    saved = optimizer.state_dict()
    saved["state"] = {
        index: {key: whole(value).cpu() for key, value in values.items()}
        for index, values in saved["state"].items()
    }
    rngs = model.ranks.all_gather(
        (torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])
    )
    if not writes:
        return
    with writing(folder):
        write_model_folder(folder / "model", model.folder, weights)
        if adapter:
            save_file(adapter, folder / "adapter.safetensors")
        state = {"version": version, "extra": extra, "optimizer": saved, "rng_by_rank": rngs}
        torch.save(state, folder / "learner.pt")


def write_model_folder(folder: Path, origin: Path, weights: dict[str, Tensor]) -> None:
    folder.mkdir()
    for file in origin.iterdir():
        if file.suffix in TEXT_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def load_learner(
    folder: Path, model: PolicyModel, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, Any]]:
    """Collective. Takes up where `save_learner` left off and returns its version and `extra`: bit for bit on the same
    number of ranks, the same values on any other. Raises `DataError` when `folder` holds another model."""
    problem = _load_masters(folder, model)
    # Ranks that look at different slices must still agree.
    if problem := next(filter(None, model.ranks.all_gather(problem)), None):
        raise DataError(f"checkpoint {folder} holds another model than {model.folder}: {problem}")
    model.refresh()
    state = torch.load(folder / "learner.pt", weights_only=True, map_location="cpu", mmap=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["optimizer"]["state"].items():
        for key, value in values.items():
            if value.shape == parameters[index].shape:
                values[key] = own_part(value, parameters[index]).clone()  # the file may go away
    optimizer.load_state_dict(state["optimizer"])
    if model.ranks.rank < len(state["rng_by_rank"]):
        cpu, cuda = state["rng_by_rank"][model.ranks.rank]
        torch.set_rng_state(cpu)
        if torch.cuda.is_available() and cuda:
            torch.cuda.set_rng_state_all(cuda)
    return state["version"], state["extra"]


def _load_masters(folder: Path, model: PolicyModel) -> str | None:
    """Reads the masters; returns what does not fit, if anything."""
    file = folder / "adapter.safetensors"
    if file.exists() != (model.adapter_scale is not None):
        return "only one of the two has an adapter (learner.lora_rank)"
    if model.adapter_scale is None:
        return _read(folder / "model" / "model.safetensors", model.masters, "model.path")
    # The base is not read, so what the adapter left as it was has to be the same.
    with safe_open(folder / "model" / "model.safetensors", "pt") as saved:
        names = set(saved.keys())
        for name, parameter in model.parameters.items():
            if lora.is_adapter(name) or lora.adapter_of(name, model.masters) is not None:
                continue
            if name not in names or tuple(saved.get_slice(name).get_shape()) != tuple(parameter.shape):
                return f"{name} is missing or has another shape (model.path)"
            expected = own_part(saved.get_tensor(name).to(parameter.dtype), parameter)
            if not torch.equal(local(expected), local(parameter)):
                return f"{name} differs (model.path)"
    return _read(file, model.masters, "model.path, learner.lora_rank")


def _read(file: Path, into: dict[str, nn.Parameter], settings: str) -> str | None:
    """Copies all tensors of `file` unless their names or shapes differ, which it then says."""
    with safe_open(file, "pt") as saved:
        shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
        if shapes != {name: tuple(parameter.shape) for name, parameter in into.items()}:
            return f"other names or shapes ({settings})"
        for name, parameter in into.items():
            parameter.copy_(own_part(saved.get_tensor(name), parameter))
    return None
